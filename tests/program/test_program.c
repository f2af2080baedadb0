/* The program `qkv` as its users see it: results, messages, exit status, and no half-written file. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "npy.h"
#include "program.h"

/* ---- Files ------------------------------------------------------------------------------------------------------- */

enum { BATCH = 2, HEADS = 4, KV_HEADS = 2, ROWS = 5, KEYS = 7, DIM = 3, DIM_V = 2 };

static array q, k, v;

static int set_up(void **state) {
  (void)state;
  remove_leftovers();
  static const int64_t shape_q[4] = {BATCH, HEADS, ROWS, DIM}, shape_k[4] = {BATCH, KV_HEADS, KEYS, DIM},
                       shape_v[4] = {BATCH, KV_HEADS, KEYS, DIM_V};
  q = random_array(4, shape_q);
  k = random_array(4, shape_k);
  v = random_array(4, shape_v);
  write_array("q.npy", &q);
  write_array("k.npy", &k);
  write_array("v.npy", &v);
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  array_free(&q);
  array_free(&k);
  array_free(&v);
  free(out_text);
  free(err_text);
  out_text = err_text = NULL;
  return 0;
}

/* ---- Results ----------------------------------------------------------------------------------------------------- */

typedef int (*visible_fn)(int64_t b, int64_t i, int64_t j);

/* The formula, in double. weights may be NULL. */
static double row_by_formula(int64_t b, int64_t h, int64_t i, visible_fn visible, double *weights, double *out) {
  double score[KEYS], max = -INFINITY, sum = 0;
  for (int j = 0; j < KEYS; j++) {
    score[j] = -INFINITY;
    if (visible != NULL && !visible(b, i, j)) continue;
    double dot = 0;
    for (int x = 0; x < DIM; x++) dot += (double)at(&q, b, h, i, x) * (double)at(&k, b, h / (HEADS / KV_HEADS), j, x);
    score[j] = dot / sqrt(DIM);
    if (score[j] > max) max = score[j];
  }
  for (int j = 0; j < KEYS; j++) sum += max > -INFINITY ? exp(score[j] - max) : 0;
  for (int x = 0; x < DIM_V; x++) out[x] = 0;
  for (int j = 0; j < KEYS; j++) {
    double p = sum > 0 ? exp(score[j] - max) / sum : 0;
    if (weights != NULL) weights[j] = p;
    for (int x = 0; x < DIM_V && p > 0; x++) out[x] += p * (double)at(&v, b, h / (HEADS / KV_HEADS), j, x);
  }
  return sum > 0 ? max + log(sum) : -INFINITY;
}

static void expect_formula(const char *out_path, const char *lse_path, visible_fn visible) {
  array out = read_array(out_path), lse = read_array(lse_path);
  assert_true(out.rank == 4 && out.shape[0] == BATCH && out.shape[1] == HEADS && out.shape[2] == ROWS &&
              out.shape[3] == DIM_V);
  assert_true(lse.rank == 3 && lse.shape[0] == BATCH && lse.shape[1] == HEADS && lse.shape[2] == ROWS);
  for (int64_t b = 0; b < BATCH; b++) {
    for (int64_t h = 0; h < HEADS; h++) {
      for (int64_t i = 0; i < ROWS; i++) {
        double want[DIM_V], want_lse = row_by_formula(b, h, i, visible, NULL, want);
        double got = (double)((const float *)lse.data)[(b * HEADS + h) * ROWS + i];
        assert_true(got == want_lse || fabs(got - want_lse) < 1e-5);
        for (int x = 0; x < DIM_V; x++) assert_true(fabs((double)at(&out, b, h, i, x) - want[x]) < 1e-5);
      }
    }
  }
  array_free(&out);
  array_free(&lse);
}

static int causal(int64_t b, int64_t i, int64_t j) {
  (void)b;
  return j <= i + KEYS - ROWS;
}

static int window_or_prefix(int64_t b, int64_t i, int64_t j) {
  (void)b;
  int64_t position = i + KEYS - ROWS;
  return j <= position && (j >= position - 1 || j < 1);
}

static int causal_start(int64_t b, int64_t i, int64_t j) {
  (void)b;
  return j <= i;
}

static const int32_t lengths[BATCH] = {3, 0};
static int by_length(int64_t b, int64_t i, int64_t j) {
  (void)i;
  return j < lengths[b];
}

static const int32_t documents[KEYS] = {1, 1, 5, 5, 5, 1, 1};
static int by_document(int64_t b, int64_t i, int64_t j) {
  (void)b;
  return documents[i + KEYS - ROWS] == documents[j];
}

static int odd_cells(int64_t b, int64_t i, int64_t j) {
  (void)b;
  return (i * KEYS + j) % 2 == 1;
}

static void test_run_against_formula(void **state) {
  (void)state;
  static const int64_t batch[1] = {BATCH}, keys[1] = {KEYS}, square[2] = {ROWS, KEYS};
  array a = int_array(1, batch, lengths);
  write_array("lengths.npy", &a);
  array_free(&a);
  a = int_array(1, keys, documents);
  write_array("documents.npy", &a);
  array_free(&a);
  assert_int_equal(array_alloc(&a, QKV_U8, 2, square), 0);
  for (int i = 0; i < ROWS * KEYS; i++) ((uint8_t *)a.data)[i] = i % 2 ? 255 : 0;
  write_array("dense.npy", &a);
  array_free(&a);

#define RUN "run --q q.npy --k k.npy --v v.npy --out o.npy --lse l.npy "
  static const struct {
    const char *line;
    visible_fn visible;
  } cases[] = {
      {RUN, NULL},
      {RUN "--algorithm standard", NULL},
      {RUN "--threads 2 --isa reference", NULL},
      {RUN "--threads 1 --isa portable --mask causal", causal},
      {RUN "--mask causal --align start", causal_start},
      {RUN "--mask causal --align 0", causal_start},
      {RUN "--mask causal --align 2", causal},
      {RUN "--mask causal_start", causal_start},
      {RUN "--mask ^causal & (window(1,0) | prefix(1))^", window_or_prefix},
      {RUN "--mask ^lengths(lengths.npy)^", by_length},
      {RUN "--kv-lengths lengths.npy", by_length},
      {RUN "--mask ^documents(documents.npy)^", by_document},
      {RUN "--mask ^dense(dense.npy)^", odd_cells},
  };
  for (size_t i = 0; i < LENGTH(cases); i++) {
    expect_ok(cases[i].line);
    assert_non_null(strstr(out_text, "GFLOP/s"));
    assert_non_null(strstr(out_text, "isa: "));
    expect_formula("o.npy", "l.npy", cases[i].visible);
  }
  expect_no_leftovers();
}

static void test_run_layouts(void **state) {
  (void)state;
  expect_ok("run --q q.npy --k k.npy --v v.npy --out o.npy --mask causal");
  array tq = exchanged(&q), tk = exchanged(&k), tv = exchanged(&v);
  write_array("tq.npy", &tq);
  write_array("tk.npy", &tk);
  write_array("tv.npy", &tv);
  expect_ok("run --q tq.npy --k tk.npy --v tv.npy --layout bshd --out to.npy --mask causal");
  array o = read_array("to.npy"), back = exchanged(&o);
  assert_true(o.shape[1] == ROWS && o.shape[2] == HEADS);
  write_array("back.npy", &back);
  expect_same_file("o.npy", "back.npy");
  array_free(&o);

  /* One head, as two axes; and the same in Fortran order. */
  array one = q, one_k = k, one_v = v;
  one.rank = one_k.rank = one_v.rank = 2;
  one.shape[0] = ROWS;
  one_k.shape[0] = one_v.shape[0] = KEYS;
  one.shape[1] = one_k.shape[1] = DIM;
  one_v.shape[1] = DIM_V;
  one.stride[0] = one_k.stride[0] = DIM;
  one_v.stride[0] = DIM_V;
  one.stride[1] = one_k.stride[1] = one_v.stride[1] = 1;
  write_array("q2.npy", &one);
  write_array("k2.npy", &one_k);
  write_array("v2.npy", &one_v);
  expect_ok("run --q q2.npy --k k2.npy --v v2.npy --out o2.npy --lse l2.npy");
  array o2 = read_array("o2.npy"), l2 = read_array("l2.npy");
  assert_true(o2.rank == 2 && o2.shape[0] == ROWS && o2.shape[1] == DIM_V);
  assert_true(l2.rank == 1 && l2.shape[0] == ROWS);
  for (int64_t i = 0; i < ROWS; i++) {
    double want[DIM_V];
    row_by_formula(0, 0, i, NULL, NULL, want);
    for (int x = 0; x < DIM_V; x++) assert_true(fabs((double)((const float *)o2.data)[i * DIM_V + x] - want[x]) < 1e-5);
  }
  array_free(&o2);
  array_free(&l2);
  unsigned char transposed[4 * ROWS * DIM];
  for (int i = 0; i < ROWS; i++) {
    for (int x = 0; x < DIM; x++) {
      float value = at(&q, 0, 0, i, x);
      uint32_t bits;
      memcpy(&bits, &value, 4);
      for (int byte = 0; byte < 4; byte++) transposed[4 * (x * ROWS + i) + byte] = (unsigned char)(bits >> 8 * byte);
    }
  }
  write_raw_npy("f2.npy", "{'descr': '<f4', 'fortran_order': True, 'shape': (5, 3), }", transposed, sizeof transposed);
  expect_ok("run --q f2.npy --k k2.npy --v v2.npy --out of.npy");
  expect_same_file("o2.npy", "of.npy");
}

static void test_run_safetensors(void **state) {
  (void)state;
  static const int64_t mask_shape[2] = {1, KEYS};
  array mask;
  assert_int_equal(array_alloc(&mask, QKV_U8, 2, mask_shape), 0);
  for (int j = 0; j < KEYS; j++) ((uint8_t *)mask.data)[j] = j < 4;
  const array *tensors[] = {&mask, &q, &k, &v};
  static const char *const names[] = {"mask", "q", "k", "v"};
  write_safetensors("in.safetensors", tensors, names, 4);
  array_free(&mask);

  expect_ok("run --q q.npy --k k.npy --v v.npy --mask ^prefix(4) & causal^ --out o.npy --lse l.npy");
  expect_ok("run --input in.safetensors --mask causal --out os.npy --lse ls.npy");
  expect_same_file("o.npy", "os.npy");
  expect_same_file("l.npy", "ls.npy");
  expect_ok("run --q in.safetensors:q --k in.safetensors:k --v v.npy --mask ^prefix(4) & causal^ --out os.npy");
  expect_same_file("o.npy", "os.npy");
  expect("run --q in.safetensors:x --k k.npy --v v.npy --out x.npy", 1, "--q: in.safetensors: no tensor 'x'");
  expect("run --q in.safetensors --k k.npy --v v.npy --out x.npy", 1, "name the tensor: in.safetensors:NAME");
  assert_false(exists("x.npy"));
}

static void test_run_options(void **state) {
  (void)state;
  static const int64_t per_head[1] = {HEADS}, bias_shape[4] = {1, HEADS, 1, KEYS};
  /* A scale by option or in the queries. */
  array twice = random_array(4, q.shape);
  for (int i = 0; i < BATCH * HEADS * ROWS * DIM; i++) ((float *)twice.data)[i] = ((const float *)q.data)[i] * 2;
  write_array("q_twice.npy", &twice);
  array_free(&twice);
  expect_ok("run --q q_twice.npy --k k.npy --v v.npy --scale 0.5 --out o.npy");
  expect_ok("run --q q.npy --k k.npy --v v.npy --scale 1 --out o2.npy");
  expect_same_file("o.npy", "o2.npy");
  /* Sinks and slopes of nothing, a bias of nothing, a cap that does not cap. */
  array a = random_array(1, per_head);
  for (int i = 0; i < HEADS; i++) ((float *)a.data)[i] = -INFINITY;
  write_array("sinks.npy", &a);
  for (int i = 0; i < HEADS; i++) ((float *)a.data)[i] = 0;
  write_array("slopes.npy", &a);
  array_free(&a);
  a = random_array(4, bias_shape);
  memset(a.data, 0, sizeof(float) * HEADS * KEYS);
  write_array("bias.npy", &a);
  array_free(&a);
  expect_ok("run --q q.npy --k k.npy --v v.npy --out o.npy");
  expect_ok("run --q q.npy --k k.npy --v v.npy --sinks sinks.npy --alibi slopes.npy --bias bias.npy --out o2.npy");
  expect_same_file("o.npy", "o2.npy");
  expect_ok("run --q q.npy --k k.npy --v v.npy --softcap 1e-3 --out o3.npy");

  /* Facts as JSON. */
  expect_ok("run --q q.npy --k k.npy --v v.npy --mask causal --json --out o.npy");
  cJSON *json = cJSON_Parse(out_text);
  assert_non_null(json);
  assert_int_equal(cJSON_GetObjectItem(json, "pairs_visible")->valuedouble, BATCH * HEADS * (3 + 4 + 5 + 6 + 7));
  assert_true(cJSON_GetObjectItem(json, "seconds")->valuedouble > 0);
  assert_true(cJSON_GetObjectItem(json, "gflops")->valuedouble > 0);
  assert_string_equal(cJSON_GetObjectItem(json, "mask")->valuestring, "causal");
  assert_string_equal(cJSON_GetObjectItem(json, "out")->valuestring, "o.npy");
  cJSON_Delete(json);
}

static void test_run_dtypes(void **state) {
  (void)state;
  static const unsigned char half[] = {0, 0x3c, 0, 0x40, 0, 0x42, 0, 0x44}; /* 1 2 3 4 */
  static const unsigned char real[] = {0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0, 0, 0, 0, 0, 0, 0,    0x40,
                                       0, 0, 0, 0, 0, 0, 8,    0x40, 0, 0, 0, 0, 0, 0, 0x10, 0x40};
  write_raw_npy("half.npy", "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 2), }", half, sizeof half);
  write_raw_npy("real.npy", "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 2), }", real, sizeof real);
  expect_ok("run --q half.npy --k half.npy --v half.npy --out oh.npy --lse lh.npy");
  expect_ok("run --q real.npy --k real.npy --v real.npy --out or.npy --lse lr.npy --weights wr.npy");
  array oh = read_array("oh.npy"), or = read_array("or.npy"), lr = read_array("lr.npy"), wr = read_array("wr.npy");
  assert_true(oh.dtype == QKV_F32 && or.dtype == QKV_F64 && lr.dtype == QKV_F64 && wr.dtype == QKV_F64);
  for (int i = 0; i < 4; i++) {
    assert_true(fabs((double)((const float *)oh.data)[i] - ((const double *) or.data)[i]) < 1e-5);
  }
  array_free(&oh);
  array_free(& or);
  array_free(&lr);
  array_free(&wr);
  expect("run --q real.npy --k half.npy --v half.npy --out x.npy", 1, "qkv run: ");
  assert_false(exists("x.npy"));
}

static void test_run_weights(void **state) {
  (void)state;
  expect_ok("run --q q.npy --k k.npy --v v.npy --mask causal --out o.npy --weights w.npy --picture w.png --rows 1:4 --head "
            "3 --batch 1");
  array w = read_array("w.npy");
  assert_true(w.rank == 2 && w.shape[0] == 3 && w.shape[1] == KEYS);
  for (int64_t i = 0; i < 3; i++) {
    double want[KEYS], out[DIM_V];
    row_by_formula(1, 3, i + 1, causal, want, out);
    for (int j = 0; j < KEYS; j++) {
      float got = ((const float *)w.data)[i * KEYS + j];
      assert_true(fabs((double)got - want[j]) < 1e-6);
      assert_true(causal(1, i + 1, j) || got == 0);
    }
  }
  array_free(&w);
  char *png = read_text("w.png");
  assert_memory_equal(png, "\x89PNG\r\n\x1a\n", 8);
  free(png);
  expect_ok("run --q q.npy --k k.npy --v v.npy --picture w.svg");
  char *svg = read_text("w.svg");
  assert_non_null(strstr(svg, "<svg "));
  assert_non_null(strstr(svg, "</svg>"));
  free(svg);
  expect("run --q q.npy --k k.npy --v v.npy --weights x.npy --head 4", 1, "--head 4: there are 4 heads");
  expect("run --q q.npy --k k.npy --v v.npy --weights x.npy --batch 2", 1, "--batch 2: there are 2 batch entries");
  expect("run --q q.npy --k k.npy --v v.npy --weights x.npy --rows 2:6", 1, "--rows 2:6: there are 5 rows");
  expect("run --q q.npy --k k.npy --v v.npy --weights x.npy --rows 3:2", 2, "--rows: '3:2' is not a range");
  expect("run --q q.npy --k k.npy --v v.npy --picture x.jpg", 2,
         "--picture: x.jpg: the name of a picture must end in .png or .svg");
  assert_false(exists("x.npy"));
  expect_no_leftovers();
}

static void test_run_empty(void **state) {
  (void)state;
  static const int64_t no_keys[4] = {BATCH, KV_HEADS, 0, DIM}, no_rows[4] = {BATCH, HEADS, 0, DIM};
  array a = random_array(4, no_keys);
  write_array("k0.npy", &a);
  array_free(&a);
  a = random_array(4, no_rows);
  write_array("q0.npy", &a);
  array_free(&a);
  expect_ok("run --q q.npy --k k0.npy --v k0.npy --out o.npy --lse l.npy --weights w.npy");
  a = read_array("o.npy");
  for (int i = 0; i < BATCH * HEADS * ROWS * DIM; i++) assert_true(((const float *)a.data)[i] == 0);
  array_free(&a);
  a = read_array("l.npy");
  for (int i = 0; i < BATCH * HEADS * ROWS; i++) assert_true(((const float *)a.data)[i] == -INFINITY);
  array_free(&a);
  expect_ok("run --q q0.npy --k k.npy --v v.npy --out o.npy");
  a = read_array("o.npy");
  assert_true(a.rank == 4 && a.shape[2] == 0 && a.shape[3] == DIM_V);
  array_free(&a);
}

/* ---- Wrong input ------------------------------------------------------------------------------------------------- */

static void test_malformed_files(void **state) {
  (void)state;
  static const struct {
    const char *dictionary;
    size_t bytes;
    const char *message;
  } cases[] = {
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4, 5, 3), }", 479,
       "--q: bad.npy: truncated: shape (2, 4, 5, 3) of dtype '<f4' needs 480 bytes of data, the file has 479"},
      {"{'descr': '>f4', 'fortran_order': False, 'shape': (2, 4, 5, 3), }", 480, "--q: bad.npy: dtype '>f4' is big-endian"},
      {"{'descr': '<c8', 'fortran_order': False, 'shape': (2, 4, 5, 3), }", 960,
       "--q: bad.npy: dtype '<c8' is not supported"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 4, 5, 3), }", 480,
       "--q: bad.npy: floating-point numbers of shape (batch, heads, rows, columns) was expected, the file has integers of "
       "shape "
       "(2, 4, 5, 3)"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (120,), }", 480,
       "--q: bad.npy: floating-point numbers of shape (batch, heads, rows, columns) was expected"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1, 1, 120), }", 480, "--q: bad.npy: rank 5, at most 4"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 4, 5, 3), }", 480,
       "--k: k.npy: batch 2 does not fit --q: bad.npy, which has 1"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4, 5, 2), }", 480,
       "--k: k.npy: head_dim 3 does not fit --q: bad.npy, which has 2"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 5, 3), }", 480,
       "num_heads 3 is not a multiple of num_kv_heads 2"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4, 5, 0), }", 480,
       "--q: bad.npy: a head_dim of at least 1 was expected"},
      {"{'descr': '<f4', 'shape': (2, 4, 5, 3), }", 480, "--q: bad.npy: header: no 'fortran_order'"},
      {"[]", 480, "--q: bad.npy: header: expected '{' at character 0"},
  };
  static const unsigned char data[1024];
  write_bytes("kept.npy", "the old content", 15);
  for (size_t i = 0; i < LENGTH(cases); i++) {
    write_raw_npy("bad.npy", cases[i].dictionary, data, cases[i].bytes);
    expect("run --q bad.npy --k k.npy --v v.npy --out kept.npy --lse new.npy", 1, cases[i].message);
    assert_true(strncmp(err_text, "qkv run: ", 9) == 0);
    assert_false(exists("new.npy"));
  }
  write_bytes("bad.npy", "\x93NUMPY\1\0\xff\xff{}", 12);
  expect("run --q bad.npy --k k.npy --v v.npy --out kept.npy", 1,
         "--q: bad.npy: the header claims 65535 bytes, but the file has only 2 after the preamble");
  write_bytes("bad.npy", "", 0);
  expect("run --q bad.npy --k k.npy --v v.npy --out kept.npy", 1, "--q: bad.npy: truncated: 0 bytes");
  write_bytes("bad.safetensors", "\xff\xff\0\0\0\0\0\0{}", 10);
  expect("run --input bad.safetensors --out kept.npy", 1, "--input: bad.safetensors: the header claims 65535 bytes");
  write_bytes("bad.safetensors", "\2\0\0\0\0\0\0\0{}", 10);
  expect("run --input bad.safetensors --out kept.npy", 1, "--input: bad.safetensors: no tensor 'q'");
  expect("run --q missing.npy --k k.npy --v v.npy --out kept.npy", 1,
         "--q: missing.npy: cannot open: No such file or directory");
  expect("run --q . --k k.npy --v v.npy --out kept.npy", 1, "--q: .: cannot read: Is a directory");
  char *kept = read_text("kept.npy");
  assert_string_equal(kept, "the old content");
  free(kept);
  expect_no_leftovers();
}

static void test_shapes_that_do_not_fit(void **state) {
  (void)state;
  static const int64_t five[1] = {5}, two_by_seven[2] = {2, 7};
  array a = random_array(1, five), b = random_array(2, two_by_seven);
  write_array("five.npy", &a);
  write_array("two_by_seven.npy", &b);
  array_free(&a);
  array_free(&b);
#define WITH "run --q q.npy --k k.npy --v v.npy --out x.npy "
  expect(WITH "--bias five.npy", 1,
         "--bias: five.npy: floating-point numbers that broadcast to (2, 4, 5, 7) was expected, the file has floating-point "
         "numbers of shape (5,)");
  expect(WITH "--alibi five.npy", 1, "--alibi: five.npy: floating-point numbers of shape (4,) or (2, 4) was expected");
  expect(WITH "--sinks two_by_seven.npy", 1, "--sinks: two_by_seven.npy: floating-point numbers of shape (4,) or (2, 4)");
  expect(WITH "--kv-lengths five.npy", 1,
         "--kv-lengths: five.npy: integers of shape (2,), one per batch entry, was expected");
  expect(WITH "--mask ^documents(five.npy)^", 1, "--mask: five.npy: integers of shape (7,) or (batch, 7) was expected");
  expect("run --q q.npy --k k.npy --v five.npy --out x.npy", 1, "--v: five.npy: ");
  expect("run --q q.npy --k k.npy --v q.npy --out x.npy", 1,
         "--v: q.npy: num_kv_heads 4 does not fit --k: k.npy, which has 2");
  assert_false(exists("x.npy"));
}

static void test_wrong_usage(void **state) {
  (void)state;
  static const struct {
    const char *line, *message;
  } cases[] = {
      {"", "qkv: a verb is missing\nTry 'qkv --help' for more information.\n"},
      {"walk", "qkv: unknown verb 'walk'\nTry 'qkv --help' for more information.\n"},
      {"--verbose", "qkv: unknown option '--verbose'\n"},
      {"run", "qkv run: --q is missing (or --input)\nTry 'qkv run --help' for more information.\n"},
      {"run --q q.npy --k k.npy --v v.npy", "qkv run: --out is missing\n"},
      {"run --q", "qkv run: option '--q' needs an argument\n"},
      {"run --queries q.npy", "qkv run: unknown or ambiguous option '--queries'\n"},
      {"run -z", "qkv run: unknown option '-z'\n"},
      {"run --json=yes", "qkv run: option '--json=yes' takes no argument\n"},
      {WITH "q.npy", "qkv run: unexpected argument 'q.npy'\n"},
      {WITH "--layout hbsd", "qkv run: --layout: 'hbsd' is neither bhsd nor bshd\n"},
      {WITH "--algorithm fast", "qkv run: --algorithm: 'fast' is neither flash nor standard\n"},
      {WITH "--threads 0", "qkv run: --threads: 0 is out of range: 1 to 4096\n"},
      {WITH "--threads two", "qkv run: --threads: 'two' is not an integer\n"},
      {WITH "--scale 1,5", "qkv run: --scale: '1,5' is not a number\n"},
      {WITH "--scale inf", "qkv run: --scale: inf is not finite\n"},
      {WITH "--align middle", "qkv run: --align: 'middle' is neither end, start nor the position of query 0\n"},
      {WITH "--isa avx1024", "qkv run: --isa: 'avx1024' is no instruction set\n"},
      {WITH "--lse x.npy", "qkv run: --out and --lse name the same file, x.npy\n"},
      {WITH "--mask ^causl & window(1,0)^",
       "qkv run: --mask: unknown term 'causl'; did you mean 'causal'?\n  causl & window(1,0)\n  ^\n"},
      {WITH "--mask ^causal & window(255 0)^", "qkv run: --mask: ',' was expected, and the number of keys to the right\n"
                                               "  causal & window(255 0)\n"
                                               "                      ^\n"},
      {WITH "--mask ^(causal^", "qkv run: --mask: '&', '|' or ')' was expected\n  (causal\n         ^\n"},
      {WITH "--mask ^causal | lengths(lengths.npy)^", "lengths(...) can only be ANDed to the whole expression"},
      {"mask --seqlen 5", "qkv mask: the expression is missing\n"},
      {"mask causal", "qkv mask: --seqlen is missing\n"},
      {"mask causal --seqlen -1", "qkv mask: --seqlen: -1 is out of range: 0 to 2147483647\n"},
      {"mask causal window --seqlen 5", "qkv mask: unexpected argument 'window'; quote the expression\n"},
      {"mask causal --seqlen 5 --rows 3:9", "qkv mask: --rows 3:9: there are 5 queries\n"},
      {"mask ^window(1,^ --seqlen 5",
       "qkv mask: the number of keys to the right was expected, or inf\n  window(1,\n           ^\n"},
      {"check --direction fwd,back", "qkv check: --direction: 'fwd,back' is no list of fwd and bwd\n"},
      {"info now", "qkv info: unexpected argument 'now'\n"},
  };
  for (size_t i = 0; i < LENGTH(cases); i++) {
    expect(cases[i].line, 2, cases[i].message);
    assert_string_equal(out_text, "");
    assert_false(exists("x.npy"));
  }
}

static void test_outputs_that_cannot_be_written(void **state) {
  (void)state;
  expect("run --q q.npy --k k.npy --v v.npy --out nowhere/o.npy", 1,
         "--out: nowhere/o.npy: cannot write: No such file or directory");
  expect("run --q q.npy --k k.npy --v v.npy --out .", 1, "--out: .: cannot write: is a directory");
  remove("l.npy");
  expect("run --q q.npy --k k.npy --v v.npy --lse l.npy --out nowhere/o.npy", 1, "nowhere/o.npy");
  assert_false(exists("l.npy"));
  if (exists("/dev/full")) {
    remove("l.npy");
    expect("run --q q.npy --k k.npy --v v.npy --out /dev/full --lse l.npy", 1,
           "/dev/full: cannot write: No space left on device");
    assert_false(exists("l.npy"));
    assert_int_equal(run_to("/dev/full", "info --no-measure"), 1);
    assert_string_equal(err_text, "qkv: cannot write to standard output\n");
  }
  expect("mask causal --seqlen 5 --png nowhere/m.png", 1, "--png: nowhere/m.png: cannot write");
  /* A device is written to, not replaced; a link stays a link. */
  expect_ok("run --q q.npy --k k.npy --v v.npy --out /dev/null");
  struct stat info;
  assert_int_equal(lstat("/dev/null", &info), 0);
  assert_true(S_ISCHR(info.st_mode));
  remove("link.npy");
  remove("target.npy");
  write_bytes("target.npy", "old", 3);
  assert_int_equal(symlink("target.npy", "link.npy"), 0);
  expect_ok("run --q q.npy --k k.npy --v v.npy --out link.npy");
  assert_int_equal(lstat("link.npy", &info), 0);
  assert_true(S_ISLNK(info.st_mode));
  array a = read_array("target.npy");
  array_free(&a);
  expect_no_leftovers();
}

/* A run of many seconds is ended; the files that were there stay, and nothing else. */
static void test_interrupt(void **state) {
  (void)state;
  static const int64_t shape[4] = {1, 8, 16384, 64};
  static const int signals[] = {SIGINT, SIGTERM};
  array a;
  assert_int_equal(array_alloc(&a, QKV_F32, 4, shape), 0);
  memset(a.data, 0, (size_t)array_count(4, shape, 4) * 4);
  write_array("large.npy", &a);
  array_free(&a);
  write_bytes("kept.npy", "the old content", 15);
  for (size_t i = 0; i < LENGTH(signals); i++) {
    char copy[1024], *arguments[MAX_ARGUMENTS];
    split("run --q large.npy --k large.npy --v large.npy --isa reference --out kept.npy --lse new.npy --threads 2",
          arguments, copy, sizeof copy);
    pid_t child = start(arguments, "stdout");
    char temporary[64];
    snprintf(temporary, sizeof temporary, "new.npy.%ld-0.tmp", (long)child);
    const struct timespec pause = {0, 20000000};
    for (int wait = 0; wait < 1500 && !exists(temporary); wait++) nanosleep(&pause, NULL);
    assert_true(exists(temporary));
    assert_int_equal(kill(child, signals[i]), 0);
    assert_int_equal(finish(child, "stdout"), 128 + signals[i]);
    assert_string_equal(err_text, "qkv run: interrupted; no file was written\n");
    assert_false(exists("new.npy"));
    expect_no_leftovers();
  }
  char *kept = read_text("kept.npy");
  assert_string_equal(kept, "the old content");
  free(kept);
  remove("large.npy");
}

/* ---- Help, info, masks ------------------------------------------------------------------------------------------- */

static void test_help_and_version(void **state) {
  (void)state;
  static const char *const verbs[] = {"run", "bench", "check", "mask", "info"};
  char line[64], start_of_help[64];
  int32_t major = QKV_VERSION_MAJOR, minor = QKV_VERSION_MINOR, patch = QKV_VERSION_PATCH;
  char version[64];
  snprintf(version, sizeof version, "qkv %d.%d.%d\n", (int)major, (int)minor, (int)patch);
  expect_ok("--help");
  assert_true(strncmp(out_text, "Usage: qkv VERB", 15) == 0);
  for (size_t i = 0; i < LENGTH(verbs); i++) assert_non_null(strstr(out_text, verbs[i]));
  expect_ok("--version");
  assert_true(strncmp(out_text, version, strlen(version)) == 0);
  for (size_t i = 0; i < LENGTH(verbs); i++) {
    snprintf(line, sizeof line, "%s --help", verbs[i]);
    snprintf(start_of_help, sizeof start_of_help, "Usage: qkv %s", verbs[i]);
    expect_ok(line);
    assert_true(strncmp(out_text, start_of_help, strlen(start_of_help)) == 0);
    snprintf(line, sizeof line, "%s --version", verbs[i]);
    expect_ok(line);
    assert_true(strncmp(out_text, version, strlen(version)) == 0);
  }
  expect_ok("-- run -h");
  expect_ok("mask --seqlen 4 --json -- causal");
}

static void test_info(void **state) {
  (void)state;
  expect_ok("info --no-measure --json");
  cJSON *json = cJSON_Parse(out_text);
  assert_non_null(json);
  assert_true(cJSON_IsString(cJSON_GetObjectItem(json, "isa")));
  assert_true(cJSON_GetObjectItem(json, "isa")->valuestring[0] != 0);
  assert_true(cJSON_GetObjectItem(json, "cpus")->valuedouble >= 1);
  assert_int_equal(cJSON_GetObjectItem(json, "order")->valuedouble, 1);
  cJSON_Delete(json);
  expect_ok("info --no-measure");
  assert_non_null(strstr(out_text, "\nisa: "));
  assert_non_null(strstr(out_text, "\ncompiler: "));
}

static void test_mask_pictures(void **state) {
  (void)state;
  expect_ok("mask causal --seqlen 3 --seqlen-kv 4");
  static const char picture[] = "   keys 0 to 3\n"
                                "0  ####....\n"
                                "   ######..\n"
                                "2  ########\n"
                                "   # visible  *+- in part  . hidden\n"
                                "mask: causal\n"
                                "pairs_all: 12\n"
                                "pairs_visible: 9 (75 %)\n";
  if (strncmp(out_text, picture, strlen(picture)) != 0) fail_msg("%s", out_text);
  expect_ok("mask ^causal & window(1,0)^ --seqlen 5 --align start --seqlen-kv 3 --rows 1: --keys :2");
  assert_non_null(strstr(out_text, "1  ####\n   ..##\n   ....\n4  ....\n"));
  expect_ok("mask ^window(70,0) & causal^ --seqlen 256 --tile");
  assert_non_null(strstr(out_text, "  0  ++......\n     ++++....\n     ++++++..\n255  ..++++++\n"));
  expect_ok("mask causal --seqlen 0");
  assert_non_null(strstr(out_text, "there is nothing to compute"));

  expect_ok("mask ^causal & window(127,0)^ --seqlen 1024 --json");
  cJSON *json = cJSON_Parse(out_text);
  assert_non_null(json);
  assert_int_equal(cJSON_GetObjectItem(json, "pairs_all")->valuedouble, 1024 * 1024);
  assert_int_equal(cJSON_GetObjectItem(json, "pairs_visible")->valuedouble, 128 * 1024 - 128 * 127 / 2);
  assert_int_equal(cJSON_GetObjectItem(json, "tiles_full")->valuedouble, 15);
  assert_int_equal(cJSON_GetObjectItem(json, "tiles_partial")->valuedouble, 16 + 14);
  assert_int_equal(cJSON_GetObjectItem(json, "tiles_skipped")->valuedouble, 256 - 45);
  assert_true(cJSON_GetObjectItem(json, "predicted_gain")->valuedouble > 5);
  cJSON_Delete(json);

  remove("m.png");
  remove("m.svg");
  expect_ok("mask ^causal & (window(511,0) | prefix(64))^ --seqlen 65536 --png m.png --svg m.svg");
  char *png = read_text("m.png"), *svg = read_text("m.svg");
  assert_memory_equal(png, "\x89PNG\r\n\x1a\n", 8);
  assert_non_null(strstr(svg, "<title>causal &amp; (window(511,0) | prefix(64))</title>"));
  free(png);
  free(svg);
  expect_no_leftovers();
}

/* Files of the mask say how many batch entries there are. */
static void test_mask_files(void **state) {
  (void)state;
  static const int64_t batch[1] = {3};
  static const int32_t counts[3] = {4, 0, 2};
  array a = int_array(1, batch, counts);
  write_array("counts.npy", &a);
  array_free(&a);
  expect_ok("mask ^lengths(counts.npy)^ --seqlen 4 --batch 2");
  assert_non_null(strstr(out_text, "0  ####....\n   ####....\n   ####....\n3  ####....\n"));
  assert_non_null(strstr(out_text, "pairs_visible: 24 "));
  expect("mask ^lengths(counts.npy)^ --seqlen 4 --batch 3", 2, "--batch 3: there are 3 batch entries");
  expect("mask ^documents(counts.npy)^ --seqlen 4", 1, "counts.npy: integers of shape (4,) or (batch, 4) was expected");
  expect("mask ^dense(missing.npy)^ --seqlen 4", 1,
         "missing.npy: cannot open: No such file or directory\n  dense(missing.npy)\n        ^\n");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_run_against_formula),
      cmocka_unit_test(test_run_layouts),
      cmocka_unit_test(test_run_safetensors),
      cmocka_unit_test(test_run_options),
      cmocka_unit_test(test_run_dtypes),
      cmocka_unit_test(test_run_weights),
      cmocka_unit_test(test_run_empty),
      cmocka_unit_test(test_malformed_files),
      cmocka_unit_test(test_shapes_that_do_not_fit),
      cmocka_unit_test(test_wrong_usage),
      cmocka_unit_test(test_outputs_that_cannot_be_written),
      cmocka_unit_test(test_interrupt),
      cmocka_unit_test(test_help_and_version),
      cmocka_unit_test(test_info),
      cmocka_unit_test(test_mask_pictures),
      cmocka_unit_test(test_mask_files),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}

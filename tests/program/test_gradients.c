/* `qkv run` with dropout and a backward pass: its files have the bits that the library gives, and agree with the formula. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cjson/cJSON.h>

#include "compare.h"
#include "npy.h"
#include "oracle.h"
#include "program.h"

enum { BATCH = 2, HEADS = 4, KV_HEADS = 2, ROWS = 5, KEYS = 7, DIM = 3, DIM_V = 2 };
enum { Q, K, V, DOUT, DLSE, BIAS, BIAS_OF_KEYS, SINKS, SINKS_OF_ENTRIES, ARRAYS };

static array in[ARRAYS];

static int set_up(void **state) {
  (void)state;
  remove_leftovers();
  static const struct {
    const char *file;
    int rank;
    int64_t shape[4];
  } arrays[ARRAYS] = {{"q.npy", 4, {BATCH, HEADS, ROWS, DIM}},
                      {"k.npy", 4, {BATCH, KV_HEADS, KEYS, DIM}},
                      {"v.npy", 4, {BATCH, KV_HEADS, KEYS, DIM_V}},
                      {"dout.npy", 4, {BATCH, HEADS, ROWS, DIM_V}},
                      {"dlse.npy", 3, {BATCH, HEADS, ROWS}},
                      {"bias.npy", 4, {BATCH, HEADS, ROWS, KEYS}},
                      {"bias_of_keys.npy", 3, {HEADS, 1, KEYS}},
                      {"sinks.npy", 1, {HEADS}},
                      {"sinks_of_entries.npy", 2, {BATCH, HEADS}}};
  for (int i = 0; i < ARRAYS; i++) {
    in[i] = random_array(arrays[i].rank, arrays[i].shape);
    write_array(arrays[i].file, &in[i]);
  }
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  for (int i = 0; i < ARRAYS; i++) array_free(&in[i]);
  free(out_text);
  free(err_text);
  out_text = err_text = NULL;
  return 0;
}

/* ---- Against the library and the oracle -------------------------------------------------------------------------- */

/* A problem on the arrays above, its results in memory of its own. */
typedef struct by_hand {
  qkv_problem p;
  qkv_gradients g;
  qkv_mask mask;
  array to[7]; /* out, lse, dq, dk, dv, dbias, dsinks */
} by_hand;

static qkv_tensor as_tensor(const array *a, int heads) {
  return qkv_bhsd(a->data, QKV_F32, heads, a->shape[2], a->shape[3]);
}

static array like(const array *a) {
  array made;
  assert_int_equal(array_alloc(&made, QKV_F32, a->rank, a->shape), 0);
  return made;
}

static void by_hand_open(by_hand *c) {
  memset(c, 0, sizeof *c);
  c->p = qkv_problem_default();
  c->g = qkv_gradients_default();
  qkv_problem *p = &c->p;
  p->batch = BATCH;
  p->num_heads = HEADS;
  p->num_kv_heads = KV_HEADS;
  p->seqlen_q = ROWS;
  p->seqlen_kv = KEYS;
  p->head_dim = DIM;
  p->head_dim_v = DIM_V;
  p->q = as_tensor(&in[Q], HEADS);
  p->k = as_tensor(&in[K], KV_HEADS);
  p->v = as_tensor(&in[V], KV_HEADS);
  c->to[0] = like(&in[DOUT]);
  c->to[1] = like(&in[DLSE]);
  p->out = as_tensor(&c->to[0], HEADS);
  p->lse = qkv_bhs(c->to[1].data, QKV_F32, HEADS, ROWS);
  c->g.dout = as_tensor(&in[DOUT], HEADS);
  for (int i = 0; i < 3; i++) c->to[2 + i] = like(&in[Q + i]);
  c->g.dq = as_tensor(&c->to[2], HEADS);
  c->g.dk = as_tensor(&c->to[3], KV_HEADS);
  c->g.dv = as_tensor(&c->to[4], KV_HEADS);
}

static void by_hand_close(by_hand *c) {
  for (int i = 0; i < 7; i++) array_free(&c->to[i]);
}

static void use_causal(by_hand *c) {
  c->mask = qkv_causal();
  c->p.mask = &c->mask;
  c->p.mask_count = 1;
}

static void use_dlse(by_hand *c) { c->g.dlse = qkv_bhs(in[DLSE].data, QKV_F32, HEADS, ROWS); }

static void use_bias(by_hand *c) {
  c->p.bias = as_tensor(&in[BIAS], HEADS);
  c->to[5] = like(&in[BIAS]);
  c->g.dbias = as_tensor(&c->to[5], HEADS);
}

/* The axes of entries and rows are summed over. */
static void use_bias_of_keys(by_hand *c) {
  c->p.bias = qkv_strided(in[BIAS_OF_KEYS].data, QKV_F32, 0, KEYS, 0, 1);
  c->to[5] = like(&in[BIAS_OF_KEYS]);
  c->g.dbias = qkv_strided(c->to[5].data, QKV_F32, 0, KEYS, 0, 1);
}

static void use_sinks(by_hand *c) {
  c->p.sinks = qkv_per_head(in[SINKS].data, QKV_F32);
  c->to[6] = like(&in[SINKS]);
  c->g.dsinks = qkv_per_head(c->to[6].data, QKV_F32);
}

static void use_sinks_of_entries(by_hand *c) {
  c->p.sinks = qkv_strided(in[SINKS_OF_ENTRIES].data, QKV_F32, HEADS, 1, 0, 0);
  c->to[6] = like(&in[SINKS_OF_ENTRIES]);
  c->g.dsinks = qkv_strided(c->to[6].data, QKV_F32, HEADS, 1, 0, 0);
}

static void make_plain(by_hand *c) { (void)c; }

static void make_everything(by_hand *c) {
  use_causal(c);
  use_dlse(c);
  use_bias_of_keys(c);
  use_sinks(c);
  c->p.softcap = 1.5;
  c->p.softmax_scale = 0.75;
}

static void make_dropout(by_hand *c) {
  use_bias(c);
  use_sinks_of_entries(c);
  c->p.dropout = 0.3;
  c->p.seed = 18446744073709551615u;
  c->p.offset = 5;
}

static void make_standard(by_hand *c) {
  use_causal(c);
  c->p.algorithm = QKV_STANDARD;
}

static void only_bias(by_hand *c) {
  use_bias_of_keys(c);
  c->g.dq.data = c->g.dk.data = c->g.dv.data = NULL;
}

static void only_keys(by_hand *c) { c->g.dq.data = c->g.dv.data = NULL; }

#define RUN "run --q q.npy --k k.npy --v v.npy --dout dout.npy "

/* The files of a run: out.npy, lse.npy, dq.npy and so on. */
static const char *const files[7] = {"out.npy", "lse.npy", "dq.npy", "dk.npy", "dv.npy", "dbias.npy", "dsinks.npy"};

static void test_gradients(void **state) {
  (void)state;
  static const struct {
    const char *options;
    void (*make)(by_hand *c);
  } cases[] = {
      {"--dq dq.npy --dk dk.npy --dv dv.npy", make_plain},
      {"--dq dq.npy --dk dk.npy --dv dv.npy --threads 2 --isa reference", make_plain},
      {"--dq dq.npy --dk dk.npy --dv dv.npy --mask causal --dlse dlse.npy --bias bias_of_keys.npy --dbias dbias.npy --sinks "
       "sinks.npy --dsinks dsinks.npy --softcap 1.5 --scale 0.75",
       make_everything},
      {"--dq dq.npy --dk dk.npy --dv dv.npy --bias bias.npy --dbias dbias.npy --sinks sinks_of_entries.npy "
       "--dsinks dsinks.npy --dropout 0.3 --seed 18446744073709551615 --offset 5 --threads 2",
       make_dropout},
      {"--dq dq.npy --dk dk.npy --dv dv.npy --mask causal --algorithm standard", make_standard},
      {"--bias bias_of_keys.npy --dbias dbias.npy", only_bias},
      {"--dk dk.npy", only_keys},
  };
  for (size_t i = 0; i < LENGTH(cases); i++) {
    char line[1024];
    by_hand c;
    compare_report report;
    for (int f = 0; f < 7; f++) remove(files[f]);
    snprintf(line, sizeof line, RUN "--out out.npy --lse lse.npy %s", cases[i].options);
    expect_ok(line);
    assert_non_null(strstr(out_text, "backward_scratch_bytes: "));
    assert_non_null(strstr(out_text, "backward_rate: "));
    by_hand_open(&c);
    cases[i].make(&c);
    assert_int_equal(qkv_forward(NULL, &c.p, NULL, 0), QKV_OK);
    assert_int_equal(qkv_backward(NULL, &c.p, &c.g, NULL, 0), QKV_OK);
    void *const wanted[7] = {c.p.out.data,  c.p.lse.data, c.g.dq.data,    c.g.dk.data,
                             c.g.dv.data, c.g.dbias.data, c.g.dsinks.data};
    for (int f = 0; f < 7; f++) {
      assert_int_equal(exists(files[f]), wanted[f] != NULL);
      if (wanted[f] == NULL) continue;
      array a = read_array(files[f]);
      assert_int_equal(a.dtype, QKV_F32);
      assert_int_equal(a.rank, c.to[f].rank);
      assert_memory_equal(a.shape, c.to[f].shape, (size_t)a.rank * sizeof a.shape[0]);
      /* What is in the file goes to the comparison with the oracle, too. */
      size_t bytes = (size_t)array_count(a.rank, a.shape, 4) * 4;
      if (memcmp(a.data, c.to[f].data, bytes) != 0) fail_msg("%s: other bits than the library's:\n%s", files[f], line);
      memcpy(c.to[f].data, a.data, bytes);
      array_free(&a);
    }
    if (!compare_gradients_oracle(&c.p, &c.g, NULL, &report)) fail_msg("%s\n%s", line, report.text);
    by_hand_close(&c);
  }
  expect_no_leftovers();
}

/* The layout of the input is that of the gradients. */
static void test_layouts(void **state) {
  (void)state;
  expect_ok(RUN "--dq dq.npy --dk dk.npy --dv dv.npy --mask causal");
  static const char *const names[] = {"tq.npy", "tk.npy", "tv.npy", "tdout.npy"};
  for (int i = 0; i < 4; i++) {
    array t = exchanged(&in[i]);
    write_array(names[i], &t);
  }
  expect_ok("run --q tq.npy --k tk.npy --v tv.npy --dout tdout.npy --layout bshd --mask causal --dq tdq.npy --dk tdk.npy "
            "--dv tdv.npy");
  static const char *const pairs[][2] = {{"dq.npy", "tdq.npy"}, {"dk.npy", "tdk.npy"}, {"dv.npy", "tdv.npy"}};
  for (size_t i = 0; i < LENGTH(pairs); i++) {
    array t = read_array(pairs[i][1]), back = exchanged(&t);
    assert_int_equal(t.shape[2], i == 0 ? HEADS : KV_HEADS);
    write_array("back.npy", &back);
    expect_same_file(pairs[i][0], "back.npy");
    array_free(&t);
  }
  expect("run --q tq.npy --k tk.npy --v tv.npy --dout dout.npy --layout bshd --dq x.npy", 1,
         "--dout: dout.npy: floating-point numbers of shape (2, 5, 4, 2), that of out, was expected, the file has "
         "floating-point numbers of shape (2, 4, 5, 2)");

  /* One head, as two axes. */
  array one[5];
  static const char *const one_names[] = {"q2.npy", "k2.npy", "v2.npy", "dout2.npy", "dlse2.npy"};
  for (int i = 0; i < 5; i++) {
    one[i] = in[i];
    int skip = in[i].rank - (i == DLSE ? 1 : 2);
    one[i].rank -= skip;
    memmove(one[i].shape, in[i].shape + skip, (size_t)one[i].rank * sizeof one[i].shape[0]);
    memmove(one[i].stride, in[i].stride + skip, (size_t)one[i].rank * sizeof one[i].stride[0]);
    write_array(one_names[i], &one[i]);
  }
  expect_ok("run --q q2.npy --k k2.npy --v v2.npy --dout dout2.npy --dlse dlse2.npy --dq dq2.npy --dk dk2.npy --dv dv2.npy");
  static const char *const made[] = {"dq2.npy", "dk2.npy", "dv2.npy"};
  for (int i = 0; i < 3; i++) {
    array a = read_array(made[i]);
    assert_int_equal(a.rank, 2);
    assert_memory_equal(a.shape, one[i].shape, 2 * sizeof a.shape[0]);
    array_free(&a);
  }
}

static void test_types(void **state) {
  (void)state;
  static const int64_t shape[2] = {4, 4};
  array wide, narrow;
  assert_int_equal(array_alloc(&wide, QKV_F64, 2, shape), 0);
  assert_int_equal(array_alloc(&narrow, QKV_F32, 2, shape), 0);
  /* bf16 holds them, too. */
  for (int i = 0; i < 16; i++) {
    ((double *)wide.data)[i] = (double)(i * 7 % 11) / 8 - 0.5;
    ((float *)narrow.data)[i] = (float)(i * 7 % 11) / 8 - 0.5F;
  }
  write_array("wide.npy", &wide);
  write_array("narrow.npy", &narrow);
  array_free(&wide);
  array_free(&narrow);
  expect_ok("run --q wide.npy --k wide.npy --v wide.npy --bias narrow.npy --dout wide.npy --dq dqw.npy --dk dkw.npy "
            "--dv dvw.npy --dbias dbw.npy");
  expect_ok("run --q narrow.npy --k narrow.npy --v narrow.npy --bias narrow.npy --dout narrow.npy --dq dqn.npy --dk dkn.npy "
            "--dv dvn.npy --dbias dbn.npy");
  static const char *const pairs[][2] = {
      {"dqw.npy", "dqn.npy"}, {"dkw.npy", "dkn.npy"}, {"dvw.npy", "dvn.npy"}, {"dbw.npy", "dbn.npy"}};
  for (size_t i = 0; i < LENGTH(pairs); i++) {
    array w = read_array(pairs[i][0]), n = read_array(pairs[i][1]);
    assert_true(w.dtype == QKV_F64 && n.dtype == QKV_F32);
    for (int x = 0; x < 16; x++) {
      assert_true(fabs(((const double *)w.data)[x] - (double)((const float *)n.data)[x]) < 1e-5);
    }
    array_free(&w);
    array_free(&n);
  }
  expect_ok("run --q narrow.npy --k narrow.npy --v narrow.npy --arithmetic fast --dout narrow.npy --dq dqf.npy");
  array f = read_array("dqf.npy");
  assert_int_equal(f.dtype, QKV_F32);
  array_free(&f);
  expect("run --q wide.npy --k wide.npy --v wide.npy --dout narrow.npy --dq x.npy", 1,
         "--dout: narrow.npy: f64 was expected, as --q: wide.npy has, the file has f32");
  expect("run --q narrow.npy --k narrow.npy --v narrow.npy --dout wide.npy --dq x.npy", 1,
         "--dout: wide.npy: f32 was expected, as --q: narrow.npy has, the file has f64");
  assert_false(exists("x.npy"));
}

static void test_safetensors(void **state) {
  (void)state;
  const array *tensors[] = {&in[Q], &in[K], &in[V], &in[DOUT], &in[DLSE], &in[BIAS]};
  static const char *const names[] = {"q", "k", "v", "dout", "dlse", "bias"};
  write_safetensors("in.safetensors", tensors, names, 6);
  write_safetensors("forward.safetensors", tensors, names, 3);
  expect_ok(RUN "--dlse dlse.npy --bias bias.npy --dq dq.npy --dbias dbias.npy");
  expect_ok("run --input in.safetensors --dq dqs.npy --dbias dbs.npy");
  expect_same_file("dq.npy", "dqs.npy");
  expect_same_file("dbias.npy", "dbs.npy");
  expect_ok("run --input in.safetensors --out o.npy"); /* dout is there, but nobody asks */
  assert_null(strstr(out_text, "backward"));
  expect("run --input forward.safetensors --dk x.npy", 1, "--dk needs --dout: forward.safetensors: no tensor 'dout'");
  expect("run --input forward.safetensors --dout dout.npy --dbias x.npy", 1,
         "--dbias needs --bias: forward.safetensors: no tensor 'bias'");
  expect("run --input in.safetensors --dsinks x.npy", 1, "--dsinks needs --sinks: in.safetensors: no tensor 'sinks'");
  assert_false(exists("x.npy"));
}

static void test_json(void **state) {
  (void)state;
  expect_ok(RUN "--mask causal --dq dq.npy --dv dv.npy --json");
  cJSON *json = cJSON_Parse(out_text);
  assert_non_null(json);
  const cJSON *backward = cJSON_GetObjectItem(json, "backward");
  assert_non_null(backward);
  assert_true(cJSON_GetObjectItem(backward, "scratch_bytes")->valuedouble > 0);
  assert_true(cJSON_GetObjectItem(backward, "seconds")->valuedouble > 0);
  assert_true(cJSON_GetObjectItem(backward, "gflops")->valuedouble > 0);
  assert_string_equal(cJSON_GetObjectItem(json, "dq")->valuestring, "dq.npy");
  assert_null(cJSON_GetObjectItem(json, "dk"));
  /* dscale = sum(q dq) / scale, to the rounding of this sum in another order and of the number's text. */
  array dq = read_array("dq.npy");
  double sum = 0, size = 0;
  for (int i = 0; i < BATCH * HEADS * ROWS * DIM; i++) {
    double product = (double)((const float *)in[Q].data)[i] * (double)((const float *)dq.data)[i];
    sum += product;
    size += fabs(product);
  }
  array_free(&dq);
  double dscale = cJSON_GetObjectItem(backward, "dscale")->valuedouble;
  assert_true(fabs(dscale - sum * sqrt(DIM)) <= size * sqrt(DIM) * 1e-12);
  cJSON_Delete(json);
}

/* ---- Dropout ----------------------------------------------------------------------------------------------------- */

#define FORWARD "run --q q.npy --k k.npy --v v.npy "

/* The mask of a region, applied by hand to the weights. */
static void test_dropout_mask(void **state) {
  (void)state;
  const double p = 0.4;
  int kept_count = 0;
  for (int b = 0; b < BATCH; b++) {
    for (int h = 0; h < HEADS; h++) {
      char line[512];
      snprintf(line, sizeof line,
               FORWARD "--mask causal --dropout 0.4 --seed 99 --out out.npy --weights w.npy --dropout-mask kept.npy "
                       "--batch %d --head %d --threads %d",
               b, h, 1 + h % 2);
      expect_ok(line);
      array out = read_array("out.npy"), w = read_array("w.npy"), kept = read_array("kept.npy");
      assert_true(kept.dtype == QKV_U8 && kept.rank == 2 && kept.shape[0] == ROWS && kept.shape[1] == KEYS);
      by_hand c;
      by_hand_open(&c);
      c.p.dropout = p;
      c.p.seed = 99;
      for (int i = 0; i < ROWS; i++) {
        double want[DIM_V] = {0}, size[DIM_V] = {0};
        for (int j = 0; j < KEYS; j++) {
          const uint8_t byte = ((const uint8_t *)kept.data)[i * KEYS + j];
          assert_int_equal(byte, oracle_kept(&c.p, b, h, i, j));
          kept_count += byte;
          for (int x = 0; x < DIM_V; x++) {
            double product = (double)((const float *)w.data)[i * KEYS + j] * byte / (1 - p) *
                             (double)at(&in[V], b, h / (HEADS / KV_HEADS), j, x);
            want[x] += product;
            size[x] += fabs(product);
          }
        }
        /* |score| <= 3 * 4 / sqrt(3) < 7, in error by at most (DIM + 6) 7 u = 63 u, in weights and in out; the sums, exp2 and
         * the log-sum-exp add less than 37 u to each. */
        for (int x = 0; x < DIM_V; x++) {
          assert_true(fabs((double)at(&out, b, h, i, x) - want[x]) <= size[x] * 200 * 0x1p-24);
        }
      }
      by_hand_close(&c);
      array_free(&out);
      array_free(&w);
      array_free(&kept);
    }
  }
  assert_in_range(kept_count, 1, BATCH * HEADS * ROWS * KEYS - 1);

  /* Some rows are those rows. */
  expect_ok(FORWARD "--dropout 0.4 --seed 99 --dropout-mask all.npy --batch 1 --head 3");
  expect_ok(FORWARD "--dropout 0.4 --seed 99 --dropout-mask some.npy --batch 1 --head 3 --rows 1:4");
  array all = read_array("all.npy"), some = read_array("some.npy");
  assert_int_equal(some.shape[0], 3);
  assert_memory_equal(some.data, (const uint8_t *)all.data + KEYS, 3 * KEYS);
  array_free(&all);
  array_free(&some);
  /* Nothing dropped, everything dropped. */
  expect_ok(FORWARD "--dropout 0 --out o0.npy --dropout-mask m0.npy");
  expect_ok(FORWARD "--out o.npy");
  expect_same_file("o.npy", "o0.npy");
  expect_ok(FORWARD "--dropout 1 --out o1.npy --dropout-mask m1.npy");
  array o1 = read_array("o1.npy"), m0 = read_array("m0.npy"), m1 = read_array("m1.npy");
  for (int i = 0; i < BATCH * HEADS * ROWS * DIM_V; i++) assert_true(((const float *)o1.data)[i] == 0);
  for (int i = 0; i < ROWS * KEYS; i++) {
    assert_true(((const uint8_t *)m0.data)[i] == 1 && ((const uint8_t *)m1.data)[i] == 0);
  }
  array_free(&o1);
  array_free(&m0);
  array_free(&m1);
  expect_no_leftovers();
}

/* ---- Wrong input ------------------------------------------------------------------------------------------------- */

static void test_wrong_input(void **state) {
  (void)state;
  static const struct {
    const char *line;
    int status;
    const char *message;
  } cases[] = {
      {RUN, 2, "--dout: no gradient is asked for: --dq, --dk, --dv, --dbias or --dsinks is missing\n"},
      {FORWARD "--out o.npy --dlse dlse.npy", 2, "--dlse: no gradient is asked for"},
      {FORWARD "--dq x.npy", 2, "qkv run: --dq needs --dout\n"},
      {FORWARD "--dsinks x.npy --sinks sinks.npy", 2, "--dsinks needs --dout\n"},
      {RUN "--dbias x.npy", 2, "--dbias needs --bias\n"},
      {RUN "--dsinks x.npy", 2, "--dsinks needs --sinks\n"},
      {RUN "--dq x.npy --dk x.npy", 2, "--dq and --dk name the same file, x.npy\n"},
      {RUN "--dq x.npy --out x.npy", 2, "--out and --dq name the same file, x.npy\n"},
      {FORWARD "--out x.npy --dropout 1.5", 2, "--dropout: 1.5 is no probability: 0 to 1\n"},
      {FORWARD "--out x.npy --dropout -0.1", 2, "--dropout: -0.1 is no probability: 0 to 1\n"},
      {FORWARD "--out x.npy --dropout often", 2, "--dropout: 'often' is not a number\n"},
      {FORWARD "--out x.npy --seed 3", 2, "--seed goes with --dropout\n"},
      {FORWARD "--out x.npy --offset 3", 2, "--offset goes with --dropout\n"},
      {FORWARD "--dropout-mask x.npy", 2, "--dropout-mask goes with --dropout\n"},
      {FORWARD "--out x.npy --dropout 0.1 --seed -3", 2, "--seed: '-3' is not an integer of at least 0\n"},
      {FORWARD "--out x.npy --dropout 0.1 --seed 18446744073709551616", 2,
       "--seed: 18446744073709551616 is out of range: 0 to 2^64 - 1\n"},
      {FORWARD "--dropout 0.1 --dropout-mask x.npy --rows 2:6", 1, "--rows 2:6: there are 5 rows\n"},
      {FORWARD "--dout q.npy --dq x.npy", 1,
       "--dout: q.npy: floating-point numbers of shape (2, 4, 5, 2), that of out, was expected, the file has floating-point "
       "numbers of shape (2, 4, 5, 3)\n"},
      {RUN "--dlse dout.npy --dq x.npy", 1,
       "--dlse: dout.npy: floating-point numbers of shape (2, 4, 5), one per row, was expected, the file has floating-point "
       "numbers of shape (2, 4, 5, 2)\n"},
      {RUN "--dlse sinks.npy --dq x.npy", 1,
       "shape (2, 4, 5), one per row, was expected, the file has floating-point numbers of shape (4,)\n"},
      {FORWARD "--dout missing.npy --dq x.npy", 1, "--dout: missing.npy: cannot open: No such file or directory\n"},
      {RUN "--dq nowhere/x.npy --dk x.npy", 1, "--dq: nowhere/x.npy: cannot write: No such file or directory\n"},
  };
  for (size_t i = 0; i < LENGTH(cases); i++) {
    expect(cases[i].line, cases[i].status, cases[i].message);
    assert_string_equal(out_text, "");
    assert_false(exists("x.npy"));
  }
  expect_no_leftovers();
}

/* Ended in the middle of the backward pass, as far as a first run tells where that is. */
static void test_interrupt(void **state) {
  (void)state;
  static const int64_t shape[3] = {1, 1536, 32};
  array a = random_array(3, shape);
  write_array("long.npy", &a);
  array_free(&a);
  static const char line[] =
      "run --q long.npy --k long.npy --v long.npy --dout long.npy --isa reference --threads 1 --dq new.npy";
  expect_ok(line);
  const char *forward = strstr(out_text, "\ntime: "), *backward = strstr(out_text, "\nbackward_time: ");
  assert_true(forward != NULL && backward != NULL);
  double wait = strtod(forward + 7, NULL) + strtod(backward + 16, NULL) / 3;
  remove("new.npy");
  write_bytes("new.npy", "the old content", 15);
  char copy[1024], *arguments[MAX_ARGUMENTS], temporary[64];
  split(line, arguments, copy, sizeof copy);
  pid_t child = start(arguments, "stdout");
  snprintf(temporary, sizeof temporary, "new.npy.%ld-0.tmp", (long)child);
  const struct timespec pause = {0, 1000000}, rest = {(time_t)wait, (long)(fmod(wait, 1) * 1e9)};
  for (int i = 0; i < 30000 && !exists(temporary); i++) nanosleep(&pause, NULL);
  assert_true(exists(temporary));
  nanosleep(&rest, NULL);
  assert_int_equal(kill(child, SIGINT), 0);
  assert_int_equal(finish(child, "stdout"), 128 + SIGINT);
  assert_string_equal(err_text, "qkv run: interrupted; no file was written\n");
  char *kept = read_text("new.npy");
  assert_string_equal(kept, "the old content");
  free(kept);
  remove("new.npy");
  expect_no_leftovers();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_gradients),    cmocka_unit_test(test_layouts),     cmocka_unit_test(test_types),
      cmocka_unit_test(test_safetensors),  cmocka_unit_test(test_json),        cmocka_unit_test(test_dropout_mask),
      cmocka_unit_test(test_wrong_input),  cmocka_unit_test(test_interrupt),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}

/* Biases by distance. ALiBi: Press, Smith, Lewis, 2021 (arXiv:2108.12409). Relative buckets: Raffel et al., T5, 2019
 * (arXiv:1910.10683), in the form of the published models. */
#include <inttypes.h>
#include <string.h>

#include "base/fpstate.h"
#include "base/run.h"
#include "base/size.h"
#include "position/angle.h"
#include "position/elements.h"
#include "position/place.h"
#include "qkv/position.h"

/* ---- ALiBi ---- */

/* With n the largest power of two up to heads_total: 2^(-8 h / n), h = 1 ... n, then every second one of the slopes for 2 n heads. */
static double slope_of(int64_t h, int64_t n) {
  const double exponent = h < n ? -8 * (double)(h + 1) / (double)n : -4 * (double)(2 * (h - n) + 1) / (double)n;
  return qkv__exp2_pair(qkv__pair_of(exponent)).high;
}

qkv_status qkv_alibi_slopes(int64_t heads_total, int64_t head_origin, int64_t num_heads, const qkv_tensor *slopes) {
  const qkv__report none = {NULL, 0};
  const qkv__named to = {"slopes", slopes, {1, num_heads, 1, 1}};
  qkv__fpstate fp;
  int64_t n = 1;
  if (heads_total < 0 || heads_total > INT32_MAX || num_heads < 0 || num_heads > heads_total) return QKV_BAD_EXTENT;
  if (head_origin < 0 || head_origin > heads_total - num_heads) return QKV_BAD_VALUE;
  if (!slopes) return QKV_BAD_POINTER;
  QKV_TRY(qkv__check_tensor(&none, &to, QKV__F32_BIT | QKV__F64_BIT, 1));
  qkv__fp_enter(&fp);
  while (2 * n <= heads_total) n *= 2;
  for (int64_t h = 0; h < num_heads; h++) {
    const double s = slope_of(head_origin + h, n);
    qkv__storer(slopes->dtype)(qkv__at(slopes, qkv__dtype_bytes(slopes->dtype), 0, h, 0, 0), 1, &s, 1);
  }
  qkv__fp_leave(&fp);
  return QKV_OK;
}

/* ---- Buckets ---- */

enum { BUCKETS_LIMIT = 1024, SUMS = 4 };

typedef struct call {
  qkv_relative r;
  int backward;
  int64_t side;                /* buckets for keys behind the query */
  int64_t from[BUCKETS_LIMIT]; /* of these: the smallest distance in it */
  int64_t rows, tasks_per_head;
} call;

/* Bucket g >= exact begins at exact * (max_distance / exact)^((g - exact) / (side - exact)), rounded up. Powers that are whole come out
 * within 2^-60 of it; no other is as near as 2^-50. */
static void set_buckets(call *k) {
  const int64_t exact = k->side / 2;
  const qkv__pair one = qkv__log2_pair((double)exact), all = qkv__log2_pair((double)k->r.max_distance);
  const qkv__pair ratio = qkv__pair_add(all, (qkv__pair){-one.high, -one.low});
  for (int64_t g = 0; g < k->side; g++) {
    k->from[g] = g;
    if (g <= exact) continue;
    const qkv__pair part = qkv__pair_div(qkv__pair_of((double)(g - exact)), qkv__pair_of((double)(k->side - exact)));
    const qkv__pair v = qkv__exp2_pair(qkv__pair_add(one, qkv__pair_mul(ratio, part)));
    const int64_t near = (int64_t)qkv__rint(v.high);
    k->from[g] = near + ((v.high - (double)near) + v.low > 0x1p-50);
  }
}

static qkv_status check(const qkv__report *r, const qkv_relative *in, call *k, int tensors) {
  QKV_TRY(qkv__take_struct(r, "relative", in, &k->r, sizeof k->r));
  qkv_relative *p = &k->r;
  if (p->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "relative.reserved %" PRId32 " is not 0", p->reserved);
  if (p->causal != 0 && p->causal != 1) return qkv__fail(r, QKV_BAD_VALUE, "causal %" PRId32 " is neither 0 nor 1", p->causal);
  if (p->accumulate != 0 && p->accumulate != 1)
    return qkv__fail(r, QKV_BAD_VALUE, "accumulate %" PRId32 " is neither 0 nor 1", p->accumulate);
  if (p->num_buckets == 0) p->num_buckets = 32;
  if (p->max_distance == 0) p->max_distance = 128;
  if (p->batch == 0) p->batch = 1;
  QKV_TRY(qkv__check_extent(r, "num_buckets", p->num_buckets, p->causal ? 2 : 4, BUCKETS_LIMIT));
  k->side = p->causal ? p->num_buckets : p->num_buckets / 2;
  QKV_TRY(qkv__check_extent(r, "max_distance", p->max_distance, k->side / 2 + 1, INT32_MAX));
  QKV_TRY(qkv__check_extent(r, "batch", p->batch, 1, INT32_MAX));
  QKV_TRY(qkv__check_extent(r, "num_heads", p->num_heads, 0, INT32_MAX));
  QKV_TRY(qkv__check_extent(r, "seqlen_q", p->seqlen_q, 0, INT32_MAX));
  QKV_TRY(qkv__check_extent(r, "seqlen_kv", p->seqlen_kv, 0, INT32_MAX));
  if (p->q_position < INT32_MIN || p->q_position > INT32_MAX)
    return qkv__fail(r, QKV_BAD_LENGTHS, "q_position %" PRId64 " does not fit 32 bits", p->q_position);
  if (p->kv_position < INT32_MIN || p->kv_position > INT32_MAX)
    return qkv__fail(r, QKV_BAD_LENGTHS, "kv_position %" PRId64 " does not fit 32 bits", p->kv_position);
  set_buckets(k);
  if (!tensors) return QKV_OK;
  const int all = QKV__F32_BIT | QKV__F64_BIT | QKV__HALF_BITS;
  const qkv__named table = {"table", &p->table, {1, p->num_heads, p->num_buckets, 1}};
  const qkv__named bias = {"bias", &p->bias, {p->batch, p->num_heads, p->seqlen_q, p->seqlen_kv}};
  QKV_TRY(qkv__check_tensor(r, &table, all, k->backward));
  QKV_TRY(qkv__check_tensor(r, &bias, all, !k->backward));
  if (p->table.data && p->bias.data && (p->table.dtype == QKV_F64) != (p->bias.dtype == QKV_F64))
    return qkv__fail(r, QKV_BAD_DTYPE, "table.dtype is %s and bias.dtype %s; both are f64 or none", qkv__dtype_name(p->table.dtype),
                     qkv__dtype_name(p->bias.dtype));
  return k->backward ? qkv__check_apart(r, &table, &bias) : qkv__check_apart(r, &bias, &table);
}

/* The bucket of a distance, and the last distance that has the same one. */
static int64_t bucket_of(const call *k, int64_t distance, int64_t *last) {
  const int ahead = distance > 0;
  const int64_t n = ahead ? distance : -distance;
  int64_t low = 0, high = k->side;
  *last = INT64_MAX;
  if (ahead && k->r.causal) return 0;
  while (high - low > 1) { /* from[low] <= n < from[high] */
    const int64_t middle = (low + high) / 2;
    if (k->from[middle] <= n)
      low = middle;
    else
      high = middle;
  }
  if (!ahead)
    *last = -k->from[low];
  else if (low + 1 < k->side)
    *last = k->from[low + 1] - 1;
  return ahead ? k->side + low : low;
}

/* Calls use(...) for each stretch of keys [j, j + n) of row i that share a bucket, n <= QKV__RUN. */
typedef void (*use_fn)(const call *k, int64_t b, int64_t h, int64_t i, int64_t j, int n, int64_t bucket, double *memory);
static void each_stretch(const call *k, int64_t b, int64_t h, int64_t i, use_fn use, double *memory) {
  const int64_t first = k->r.kv_position - k->r.q_position - i;
  for (int64_t j = 0; j < k->r.seqlen_kv;) {
    int64_t last, n;
    const int64_t bucket = bucket_of(k, first + j, &last);
    const int64_t end = last >= first + k->r.seqlen_kv ? k->r.seqlen_kv : last - first + 1;
    for (; j < end; j += n) {
      n = QKV_MIN(end - j, QKV__RUN);
      use(k, b, h, i, j, (int)n, bucket, memory);
    }
  }
}

static void write_stretch(const call *k, int64_t b, int64_t h, int64_t i, int64_t j, int n, int64_t bucket, double *value) {
  const qkv_tensor *t = &k->r.table, *to = &k->r.bias;
  qkv__loader(t->dtype)(value, qkv__at(t, qkv__dtype_bytes(t->dtype), 0, h, bucket, 0), 1, 1);
  for (int x = 1; x < n; x++) value[x] = value[0];
  qkv__storer(to->dtype)(qkv__at(to, qkv__dtype_bytes(to->dtype), b, h, i, j), to->stride[3], value, n);
}

static void write_rows(void *arg, int64_t task, int32_t worker) {
  const call *k = arg;
  const int64_t bh = task / k->tasks_per_head, from = task % k->tasks_per_head * k->rows;
  double value[QKV__RUN];
  (void)worker;
  for (int64_t i = from; i < QKV_MIN(from + k->rows, k->r.seqlen_q); i++)
    each_stretch(k, bh / k->r.num_heads, bh % k->r.num_heads, i, write_stretch, value);
}

/* Key j goes to sum j mod 4 of its bucket. */
static void add_stretch(const call *k, int64_t b, int64_t h, int64_t i, int64_t j, int n, int64_t bucket, double *sums) {
  const qkv_tensor *from = &k->r.bias;
  double v[QKV__RUN + SUMS], s[SUMS], *all = sums + bucket * SUMS;
  qkv__loader(from->dtype)(v, qkv__at(from, qkv__dtype_bytes(from->dtype), b, h, i, j), from->stride[3], n);
  for (int x = 0; x < SUMS; x++) s[x] = all[(j + x) % SUMS];
  int x = 0;
  for (; x + SUMS <= n; x += SUMS)
    for (int y = 0; y < SUMS; y++) s[y] += v[x + y];
  for (int y = 0; x + y < n; y++) s[y] += v[x + y];
  for (x = 0; x < SUMS; x++) all[(j + x) % SUMS] = s[x];
}

static void add_head(void *arg, int64_t h, int32_t worker) {
  const call *k = arg;
  const qkv_tensor *t = &k->r.table;
  double sums[BUCKETS_LIMIT * SUMS];
  (void)worker;
  memset(sums, 0, (size_t)k->r.num_buckets * SUMS * sizeof *sums);
  for (int64_t b = 0; b < k->r.batch; b++)
    for (int64_t i = 0; i < k->r.seqlen_q; i++) each_stretch(k, b, h, i, add_stretch, sums);
  for (int64_t g = 0; g < k->r.num_buckets; g++) {
    const double *s = sums + g * SUMS;
    double total = (s[0] + s[1]) + (s[2] + s[3]), old = 0;
    void *at = qkv__at(t, qkv__dtype_bytes(t->dtype), 0, h, g, 0);
    if (k->r.accumulate) qkv__loader(t->dtype)(&old, at, 1, 1);
    total += old;
    qkv__storer(t->dtype)(at, 1, &total, 1);
  }
}

static qkv_status run(const qkv_context *context, call *k) {
  const qkv_relative *p = &k->r;
  qkv_context c;
  QKV_TRY(qkv__check_context(context, &c, NULL, 0));
  if (k->backward) return qkv__run(&c, add_head, k, p->num_heads);
  if (!p->num_heads || !p->seqlen_q) return QKV_OK;
  k->rows = qkv__task_rows(p->seqlen_q, p->seqlen_kv);
  k->tasks_per_head = (p->seqlen_q + k->rows - 1) / k->rows;
  int64_t tasks;
  if (!qkv__mul(p->batch * p->num_heads, k->tasks_per_head, &tasks)) return QKV_TOO_LARGE;
  return qkv__run(&c, write_rows, k, tasks);
}

static qkv_status relative(const qkv_context *context, const qkv_relative *in, int backward) {
  const qkv__report none = {NULL, 0};
  call k;
  qkv__fpstate fp;
  qkv__fp_enter(&fp);
  k.backward = backward;
  qkv_status s = check(&none, in, &k, 1);
  if (s == QKV_OK) s = run(context, &k);
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_relative_check(const qkv_relative *in, char *text, size_t bytes) {
  const qkv__report r = {text, bytes};
  call k;
  qkv__fpstate fp;
  if (text && bytes) text[0] = 0;
  qkv__fp_enter(&fp);
  k.backward = 0;
  const qkv_status s = check(&r, in, &k, 1);
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_relative_bucket(const qkv_relative *in, int64_t distance, int64_t *bucket) {
  const qkv__report none = {NULL, 0};
  call k;
  qkv__fpstate fp;
  int64_t last;
  if (!bucket) return QKV_BAD_POINTER;
  if (distance == INT64_MIN) distance++;
  qkv__fp_enter(&fp);
  k.backward = 0;
  const qkv_status s = check(&none, in, &k, 0);
  if (s == QKV_OK) *bucket = bucket_of(&k, distance, &last);
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_relative_forward(const qkv_context *context, const qkv_relative *in) { return relative(context, in, 0); }
qkv_status qkv_relative_backward(const qkv_context *context, const qkv_relative *in) { return relative(context, in, 1); }

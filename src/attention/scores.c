/* Scores and weights of chosen rows: the scalar text, one task per row. */
#include "attention/state.h"
#include "base/fpstate.h"
#include "base/run.h"
#include "reference/reference.h"

typedef struct job {
  qkv__problem p;
  qkv_region r;
  qkv_tensor to;
  int32_t stage;
  char *memory;
  size_t bytes; /* of each worker */
} job;

static void task(void *arg, int64_t index, int32_t worker) {
  const job *j = arg;
  const int64_t rows = j->r.row_end - j->r.row_begin, heads = j->r.head_end - j->r.head_begin;
  const int64_t row = index % rows, head = index / rows % heads, batch = index / rows / heads;
  const int wide = j->to.dtype == QKV_F64;
  qkv__entry e;
  qkv__entry_of(&j->p, j->r.batch_begin + batch, &e);
  void *to = qkv__at(&j->to, qkv__dtype_bytes(j->to.dtype), batch, head, row, 0);
  void *work = j->memory + (size_t)worker * j->bytes;
  if (j->p.f64)
    qkv__reference_scores_f64(&j->p, &e, j->r.head_begin + head, j->r.row_begin + row, j->stage, to, j->to.stride[3], wide,
                              work);
  else
    qkv__reference_scores_f32(&j->p, &e, j->r.head_begin + head, j->r.row_begin + row, j->stage, to, j->to.stride[3], wide,
                              work);
}

qkv_status qkv_scores(const qkv_context *context, const qkv_problem *problem, int32_t stage, const qkv_region *region,
                      const qkv_tensor *to) {
  job j;
  qkv_context c;
  qkv__fpstate fp;
  qkv__memory m;
  qkv__fp_enter(&fp);
  qkv_status s = qkv__check_context(context, &c, NULL, 0);
  if (s == QKV_OK) s = qkv__check(problem, QKV__USES_QK, &j.p, NULL, 0);
  if (s == QKV_OK && (stage < QKV_SCORES_RAW || stage > QKV_KEPT)) s = QKV_BAD_VALUE;
  if (s == QKV_OK) s = qkv__check_region(&j.p, region, to, &j.r);
  if (s == QKV_OK) {
    qkv__carver all = {NULL, 0, 0};
    j.to = *to;
    j.stage = stage;
    j.bytes = (j.p.f64 ? qkv__reference_work_f64(&j.p) : qkv__reference_work_f32(&j.p)) + QKV__MEMORY_SLACK;
    j.bytes = j.bytes / 64 * 64;
    qkv__carve(&all, c.num_workers, j.bytes);
    s = all.overflow ? QKV_TOO_LARGE : qkv__memory_take(&c, NULL, 0, all.used, &m);
    if (s == QKV_OK) {
      j.memory = m.base;
      s = qkv__run(&c, task, &j,
                   (j.r.batch_end - j.r.batch_begin) * (j.r.head_end - j.r.head_begin) * (j.r.row_end - j.r.row_begin));
      qkv__memory_release(&c, &m);
    }
  }
  qkv__fp_leave(&fp);
  return s;
}

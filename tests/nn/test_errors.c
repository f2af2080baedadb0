/* What is wrong is named, by status and text, and nothing is written. */
#include "layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static layer l;

typedef struct fault {
  void (*make)(void);
  qkv_status status;
  const char *text; /* the beginning */
  int backward;
} fault;

#define MAKE(name, ...) \
  static void name(void) { __VA_ARGS__; }
MAKE(size_0, l.m.size = 0)
MAKE(size_large, l.m.size = 70000)
MAKE(dtype_f16, l.m.dtype = QKV_F16)
MAKE(gemm_2, l.m.gemm = 2)
MAKE(reserved_1, l.m.reserved = 1)
MAKE(d_model_0, l.m.d_model = 0)
MAKE(d_out_negative, l.m.d_out = -1)
MAKE(d_model_indivisible, l.p.head_dim = 0; l.p.num_heads = l.p.num_kv_heads = 4)
MAKE(attention_none, l.m.attention = NULL)
MAKE(attention_size, l.p.size = 1)
MAKE(kv_heads, l.p.num_heads = 3)
MAKE(scale_nan, l.p.softmax_scale = NAN)
MAKE(mask_kind, l.mask[0].kind = 99; l.p.mask_count = 1)
MAKE(bias_dtype, l.p.bias.data = l.dy.t.data; l.p.bias.dtype = QKV_U8)
MAKE(length, l.q_length[1] = 6; l.p.q_length = l.q_length)
MAKE(own_q, l.p.q.data = l.m.x.data)
MAKE(seqlen_kv, l.p.seqlen_kv = 4)
MAKE(cu_seqlens_kv, l.p.cu_seqlens_kv = l.cu[1])
MAKE(mask_rows, l.m.mask_rows = 6)
MAKE(mask_keys, l.m.mask_keys = 4)
MAKE(x_none, l.m.x.data = NULL)
MAKE(x_dtype, l.m.x.dtype = QKV_F32)
MAKE(x_columns, l.m.x.stride[3] = 2)
MAKE(x_rows, l.m.x.stride[2] = 5)
MAKE(x_broadcast, l.m.x.stride[2] = 0)
MAKE(x_kv_given, l.m.x_kv = l.m.x)
MAKE(wq_none, l.m.projections.wq.data = NULL)
MAKE(wk_rows, l.m.projections.wk.stride[2] = 1)
MAKE(wo_dtype, l.m.projections.wo.dtype = QKV_BF16)
MAKE(bv_dtype, l.m.projections.bv.dtype = QKV_F32)
MAKE(y_itself, l.m.y.stride[0] = 6)
MAKE(y_over_x, l.m.y = l.m.x)
MAKE(y_over_wv, l.m.y.data = l.m.projections.wv.data)
MAKE(y_over_activations, l.m.y.data = l.activations)
MAKE(activations_over_x, l.m.activations = l.in[X].memory; l.m.activation_bytes = 1 << 20)
MAKE(activation_bytes, l.m.activation_bytes -= 1)
MAKE(activations_missing, l.m.activations = NULL)
MAKE(activations_odd, l.m.activations = (char *)l.activations + 1)
MAKE(rotary_size, l.m.rotary_q = &l.rotary[0]; l.rotary[0].size = 2)
MAKE(rotary_table, l.m.rotary_k = &l.rotary[1]; l.rotary[1] = qkv_rotary_default())
MAKE(rotary_heads, l.m.rotary_k = &l.rotary[1]; l.rotary[1] = qkv_rotary_default(); l.rotary[1].num_heads = 2)
MAKE(gradients_size, l.g.size = 3)
MAKE(gradients_accumulate, l.g.accumulate = 64)
MAKE(dy_none, l.g.dy.data = NULL)
MAKE(dy_strides, l.g.dy.stride[2] = 3)
MAKE(dx_over_dy, l.g.dx = l.g.dy)
MAKE(dx_kv_given, l.g.dx_kv = l.d[X].t)
MAKE(dwq_over_wq, l.g.projections.wq = l.m.projections.wq)
MAKE(dwk_over_dwv, l.g.projections.wk = l.g.projections.wv)
MAKE(dbias_without, l.g.dbias = l.d[X].t)
MAKE(backward_inference, l.m.activations = NULL; l.m.activation_bytes = 0)

static const fault faults[] = {
    {size_0, QKV_BAD_SIZE, "multihead.size 0", 0},
    {size_large, QKV_BAD_SIZE, "multihead.size 70000", 0},
    {dtype_f16, QKV_BAD_DTYPE, "dtype is f16", 0},
    {gemm_2, QKV_BAD_VALUE, "gemm 2", 0},
    {reserved_1, QKV_UNKNOWN_FIELD, "reserved 1", 0},
    {d_model_0, QKV_BAD_EXTENT, "d_model 0", 0},
    {d_out_negative, QKV_BAD_EXTENT, "d_out -1", 0},
    {d_model_indivisible, QKV_BAD_EXTENT, "d_model 6 is not a multiple of num_heads 4", 0},
    {attention_none, QKV_BAD_POINTER, "attention is NULL", 0},
    {attention_size, QKV_BAD_SIZE, "attention.size 1", 0},
    {kv_heads, QKV_BAD_EXTENT, "attention: num_heads 3 is not a multiple of num_kv_heads 2", 0},
    {scale_nan, QKV_BAD_VALUE, "attention: softmax_scale", 0},
    {mask_kind, QKV_BAD_MASK, "attention: mask[0].kind 99", 0},
    {bias_dtype, QKV_BAD_DTYPE, "attention: bias.dtype is u8", 0},
    {length, QKV_BAD_LENGTHS, "attention: q_length[1] 6", 0},
    {own_q, QKV_BAD_POINTER, "attention: q.data is given", 0},
    {seqlen_kv, QKV_BAD_EXTENT, "attention: seqlen_kv 4 is not seqlen_q 5", 0},
    {cu_seqlens_kv, QKV_BAD_LENGTHS, "attention: cu_seqlens_kv is given", 0},
    {mask_rows, QKV_BAD_MASK, "mask_rows 6 is not the number of rows, 5", 0},
    {mask_keys, QKV_BAD_MASK, "mask_keys 4 is not the number of keys, 5", 0},
    {x_none, QKV_BAD_POINTER, "x.data is NULL", 0},
    {x_dtype, QKV_BAD_DTYPE, "x.dtype is f32, but f64 is needed here", 0},
    {x_columns, QKV_BAD_STRIDE, "x: stride 6 of its 5 rows and 2 of its 6 columns", 0},
    {x_rows, QKV_BAD_STRIDE, "x: stride 5 of its 5 rows", 0},
    {x_broadcast, QKV_BAD_STRIDE, "x: stride 0 of its 5 rows", 0},
    {x_kv_given, QKV_BAD_POINTER, "x_kv.data is given, but d_kv is 0", 0},
    {wq_none, QKV_BAD_POINTER, "projections.wq.data is NULL", 0},
    {wk_rows, QKV_BAD_STRIDE, "projections.wk: stride 1 of its 8 rows and 1", 0},
    {wo_dtype, QKV_BAD_DTYPE, "projections.wo.dtype is bf16", 0},
    {bv_dtype, QKV_BAD_DTYPE, "projections.bv.dtype is f32", 0},
    {y_itself, QKV_BAD_STRIDE, "y overlaps itself", 0},
    {y_over_x, QKV_BAD_OVERLAP, "y overlaps x", 0},
    {y_over_wv, QKV_BAD_OVERLAP, "y overlaps projections.w", 0},
    {y_over_activations, QKV_BAD_OVERLAP, "activations overlaps y", 0},
    {activations_over_x, QKV_BAD_OVERLAP, "activations overlaps x", 0},
    {activation_bytes, QKV_SCRATCH_TOO_SMALL, "activation_bytes", 0},
    {activations_missing, QKV_BAD_POINTER, "activations is NULL, but activation_bytes is", 0},
    {activations_odd, QKV_BAD_POINTER, "activations 0x", 0},
    {rotary_size, QKV_BAD_SIZE, "rotary_q.size 2", 0},
    {rotary_table, QKV_BAD_POINTER, "rotary_k: table is NULL", 0},
    {rotary_heads, QKV_BAD_VALUE, "rotary_k: batch, num_heads", 0},
    {gradients_size, QKV_BAD_SIZE, "gradients.size 3", 1},
    {gradients_accumulate, QKV_UNKNOWN_FIELD, "gradients.accumulate 0x40", 1},
    {dy_none, QKV_BAD_POINTER, "gradients.dy.data is NULL", 1},
    {dy_strides, QKV_BAD_STRIDE, "gradients.dy: stride 3 of its 5 rows", 1},
    {dx_over_dy, QKV_BAD_OVERLAP, "gradients.dx overlaps gradients.dy", 1},
    {dx_kv_given, QKV_BAD_POINTER, "gradients.dx_kv.data is given, but d_kv is 0", 1},
    {dwq_over_wq, QKV_BAD_OVERLAP, "gradients.projections.wq overlaps projections.wq", 1},
    {dwk_over_dwv, QKV_BAD_OVERLAP, "gradients.projections.wv overlaps gradients.projections.wk", 1},
    {dbias_without, QKV_BAD_POINTER, "attention: gradients.dbias is given", 1},
    {backward_inference, QKV_BAD_POINTER, "activations is NULL", 1},
};

static void each_fault(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
    const fault *f = &faults[i];
    layer_config c = layer_config_default();
    c.rotary = NO_ROTARY;
    char text[256] = "";
    layer_open(&l, &c);
    l.rotary[0] = l.rotary[1] = qkv_rotary_default();
    layer_forward(&l, NULL);
    layer_clear(&l, &l.y);
    void *kept = l.activations, *before = malloc(l.m.activation_bytes);
    const size_t bytes = l.m.activation_bytes;
    assert_non_null(before);
    memcpy(before, kept, bytes);
    f->make();
    const qkv_status checked = f->backward ? qkv_multihead_backward_check(&l.m, &l.g, text, sizeof text)
                                           : qkv_multihead_check(&l.m, text, sizeof text);
    if (checked != f->status || strncmp(text, f->text, strlen(f->text)) != 0)
      fail_msg("status %d '%s', expected %d '%s...'", (int)checked, text, (int)f->status, f->text);
    assert_int_equal(f->backward ? qkv_multihead_backward(NULL, &l.m, &l.g, NULL, 0) : qkv_multihead_forward(NULL, &l.m, NULL, 0),
                     f->status);
    for (size_t k = 0; k < l.y.bytes; k++) assert_int_equal(l.y.memory[k], 0xff);
    for (int t = 0; t < TENSORS; t++)
      for (size_t k = 0; k < l.d[t].bytes && l.d[t].memory; k++) assert_int_equal(l.d[t].memory[k], 0xff);
    assert_memory_equal(before, kept, bytes);
    free(before);
    layer_close(&l);
  }
}

/* A mask of another size than the longest entry of a ragged batch; extents that do not fit; texts of any length. */
static void more(void **state) {
  (void)state;
  layer_config c = layer_config_default();
  char text[256];
  c.lengths = RAGGED;
  layer_open(&l, &c);
  l.m.mask_rows = l.m.mask_keys = 5;
  assert_int_equal(qkv_multihead_check(&l.m, text, sizeof text), QKV_OK);
  assert_int_equal(text[0], 0);
  l.m.mask_keys = 6;
  assert_int_equal(qkv_multihead_check(&l.m, NULL, 0), QKV_BAD_MASK);
  assert_int_equal(qkv_multihead_check(&l.m, text, 8), QKV_BAD_MASK);
  assert_string_equal(text, "mask_ke");
  l.m.mask_keys = 0;
  l.cu[1][1]--;
  assert_int_equal(qkv_multihead_check(&l.m, text, sizeof text), QKV_BAD_LENGTHS);
  assert_non_null(strstr(text, "cu_seqlens_kv[1] 4 is not cu_seqlens_q[1] 5"));
  layer_close(&l);

  qkv_problem a = qkv_problem_default();
  qkv_multihead m = qkv_multihead_default();
  size_t bytes;
  m.attention = &a;
  m.d_model = 1 << 20;
  a.num_heads = 1 << 20;
  a.head_dim = 1 << 20;
  assert_int_equal(qkv_multihead_check(&m, text, sizeof text), QKV_BAD_EXTENT);
  assert_non_null(strstr(text, "num_heads x head_dim 1099511627776"));
  a.num_heads = 1 << 10;
  a.head_dim = 1 << 10;
  a.batch = a.seqlen_q = INT32_MAX - 1;
  assert_int_equal(qkv_multihead_activations(&m, &bytes), QKV_TOO_LARGE);
  assert_int_equal(qkv_multihead_activations(&m, NULL), QKV_BAD_POINTER);
  assert_int_equal(qkv_multihead_scratch(NULL, &m, NULL), QKV_BAD_POINTER);
  assert_int_equal(qkv_multihead_check(NULL, text, sizeof text), QKV_BAD_POINTER);
  assert_string_equal(text, "multihead is NULL");
  assert_int_equal(qkv_multihead_backward_check(&m, NULL, text, sizeof text), QKV_BAD_POINTER);
  assert_string_equal(text, "gradients is NULL");

  struct {
    qkv_multihead m;
    int64_t later;
  } grown = {m, 1};
  grown.m.size = sizeof grown;
  assert_int_equal(qkv_multihead_check(&grown.m, text, sizeof text), QKV_UNKNOWN_FIELD);

  qkv_context context = qkv_context_default();
  c = layer_config_default();
  layer_open(&l, &c);
  context.num_workers = -1;
  assert_int_equal(qkv_multihead_forward(&context, &l.m, NULL, 0), QKV_BAD_CONTEXT);
  context.size = 1;
  assert_int_equal(qkv_multihead_backward(&context, &l.m, &l.g, NULL, 0), QKV_BAD_SIZE);
  assert_int_equal(qkv_multihead_forward(NULL, &l.m, NULL, 1), QKV_BAD_POINTER);
  layer_close(&l);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(each_fault), cmocka_unit_test(more)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

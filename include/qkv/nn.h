/* qkv/nn: the multi-head attention layer, forward and backward. C11 and C++; library qkv-nn, beside qkv; see docs/NN.md.
 *
 *     y = attention(x Wq^T + bq, x_kv Wk^T + bk, x_kv Wv^T + bv) Wo^T + bo
 *
 * The heads are views of the projections' results: nothing is split, transposed or copied. Products are made by a CBLAS (OpenBLAS,
 * BLIS, MKL ...), attention by qkv.
 *
 *     qkv_mask causal = qkv_causal();
 *     qkv_problem a = qkv_problem_default();                        extents and every option of attention
 *     a.batch = 1; a.seqlen_q = a.seqlen_kv = n; a.num_heads = 12; a.num_kv_heads = 4; a.head_dim = 64;
 *     a.mask = &causal; a.mask_count = 1;
 *     qkv_multihead m = qkv_multihead_default();
 *     m.attention = &a; m.d_model = 768;
 *     m.x = qkv_bsd(x, QKV_F32, n, 768);   m.y = qkv_bsd(y, QKV_F32, n, 768);
 *     qkv_projections_place(&m, 1, weights, &m.projections, NULL);  or tensors of your own
 *     qkv_status s = qkv_multihead_forward(NULL, &m, NULL, 0);
 *
 * The rules of qkv.h hold: all-zero is the default, strides count elements, memory is the caller's, each call checks everything
 * before it writes anything, an error writes nothing. The layer's bits are those of the BLAS: see docs/NN.md.
 */
#ifndef QKV_NN_H
#define QKV_NN_H

#include <qkv/position.h>
#include <qkv/qkv.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Parameters ---------------------------------------------------------------------------------------------------- */

/* Weights as torch.nn.Linear has them: row = output, column = input; stride[2] per row, stride[3] per column, one of which is 1 and
 * the other at least the extent of its axis. So a transposed weight is a view too. Biases have stride[3] per element; data NULL:
 * none. With H heads, G key-value heads, dims d and e = head_dim_v, the rows of head h are h * d ... h * d + d - 1 (e for v):
 *
 *     wq (H d, d_model)   wk (G d, d_kv)   wv (G e, d_kv)   wo (d_out, H e)        bq (H d)   bk (G d)   bv (G e)   bo (d_out)
 *
 * A fused weight is these views of it: where wk begins right behind wq, and wv behind wk (torch's in_proj_weight), one product makes
 * all three; the same for wk and wv alone, and for gradients. */
typedef struct qkv_projections {
  qkv_tensor wq, wk, wv, wo;
  qkv_tensor bq, bk, bv, bo;
} qkv_projections;

/* ---- The layer ----------------------------------------------------------------------------------------------------- */

/* Who divides the products among threads. WHOLE: the BLAS, by threads of its own; the calling thread makes one call over all rows.
 * TASKS: the context's executor, in pieces of 256 rows of the result; have the BLAS use one thread. Then the number of threads does
 * not change the bits. The module never changes the BLAS's number of threads, which is a global of the process. */
enum { QKV_GEMM_WHOLE = 0, QKV_GEMM_TASKS = 1 };

typedef struct qkv_multihead {
  uint32_t size; /* sizeof(qkv_multihead) */
  int32_t dtype; /* QKV_F32 or QKV_F64, of all tensors here; 0: QKV_F32 */
  int32_t gemm;  /* QKV_GEMM_... */
  int32_t reserved;

  int64_t d_model; /* columns of x */
  int64_t d_kv;    /* columns of x_kv; 0: self-attention, keys and values are from x */
  int64_t d_out;   /* columns of y; 0: d_model */

  /* Extents, mask, bias, lengths, ragged batch, dropout and all else, as for qkv_forward. q, k, v, out and lse are left empty: they
   * lie in the activations. head_dim 0: d_model / num_heads, which must be whole; any other head_dim need not fit d_model.
   * In self-attention seqlen_kv is 0 or seqlen_q, and cu_seqlens_kv NULL or as cu_seqlens_q. */
  const qkv_problem *attention;
  /* The extents that the caller's dense masks and bias have, 0: not said. Strides do not show a mask of another size; with these,
   * one that differs from the rows or keys of the (longest) entry is an error. */
  int64_t mask_rows, mask_keys;

  /* Rotary embedding of q and of k, in place: pairing, table, start, starts, position_ids are used, the rest is left 0. Positions
   * count from each entry's first row; with cu_seqlens, position_ids are packed rows like x. NULL: none. */
  const qkv_rotary *rotary_q, *rotary_k;

  qkv_projections projections;

  /* (batch, -, row, column), strides 0, 2 and 3; of a ragged batch, stride[0] is not used. Rows or columns are contiguous: stride[3]
   * = 1 with stride[2] at least the columns (any layout with whole rows, (row, batch, column) too), or stride[2] = 1 with
   * stride[3] at least the rows. Rows that the lengths leave out are not read; their y and their gradients are 0. */
  qkv_tensor x;    /* (batch, seqlen_q, d_model) */
  qkv_tensor x_kv; /* (batch, seqlen_kv, d_kv); empty in self-attention */
  qkv_tensor y;    /* (batch, seqlen_q, d_out) */

  /* q, k, v, attention's output and lse, left by forward for backward and qkv_multihead_problem. qkv_multihead_activations bytes,
   * aligned to 8 (64 is faster). NULL with 0 bytes: inference, they lie in the scratch. */
  void *activations;
  size_t activation_bytes;
} qkv_multihead;

/* What comes in, and which gradients are wanted: those whose data is not NULL. Shapes, types and rules for strides are those of the
 * tensors they belong to. */
typedef struct qkv_multihead_gradients {
  uint32_t size;      /* sizeof(qkv_multihead_gradients) */
  int32_t accumulate; /* set of QKV_DX, QKV_DX_KV, QKV_DPROJECTIONS, QKV_DBIAS, QKV_DSINKS: these are added to what is there */
  qkv_tensor dy;
  qkv_tensor dx;               /* in self-attention the sum over q, k and v */
  qkv_tensor dx_kv;            /* cross-attention */
  qkv_projections projections; /* of weights and biases */
  qkv_tensor dbias, dsinks;    /* of attention's bias and sinks, as in qkv_gradients */
} qkv_multihead_gradients;
enum { QKV_DX = 1, QKV_DX_KV = 2, QKV_DPROJECTIONS = 4 };

/* ---- Calls --------------------------------------------------------------------------------------------------------- */

/* Each works on any thread. Where a call takes scratch: at least the bytes that the function before it says, any alignment, or NULL
 * with bytes 0: one allocation through the context. */

/* Checks as qkv_check does: the text names the field and its values; what is wrong with the attention problem is preceded by
 * "attention: ". The functions below that run nothing need no data in tensors. */
QKV_API qkv_status qkv_multihead_check(const qkv_multihead *multihead, char *text, size_t bytes);

/* Parameters (or their gradients) in one block without gaps, torch's order: wq, wk, wv, if biases is not 0 bq, bk, bv; then wo, bo.
 * Fills *to with views of memory, and *bytes; either may be NULL, and with it memory. */
QKV_API qkv_status qkv_projections_place(const qkv_multihead *multihead, int32_t biases, void *memory, qkv_projections *to,
                                         size_t *bytes);
/* Bytes of activations; the scratch of forward, by what multihead->activations is. Never less for a smaller batch or length: ask once
 * for the largest. */
QKV_API qkv_status qkv_multihead_activations(const qkv_multihead *multihead, size_t *bytes);
QKV_API qkv_status qkv_multihead_scratch(const qkv_context *context, const qkv_multihead *multihead, size_t *bytes);
/* Writes y and the activations. */
QKV_API qkv_status qkv_multihead_forward(const qkv_context *context, const qkv_multihead *multihead, void *scratch, size_t bytes);

/* The same for the gradients. Reads x, x_kv, parameters and activations as forward used and left them; y is not used. */
QKV_API qkv_status qkv_multihead_backward_check(const qkv_multihead *multihead, const qkv_multihead_gradients *gradients, char *text,
                                                size_t bytes);
QKV_API qkv_status qkv_multihead_backward_scratch(const qkv_context *context, const qkv_multihead *multihead,
                                                  const qkv_multihead_gradients *gradients, size_t *bytes);
QKV_API qkv_status qkv_multihead_backward(const qkv_context *context, const qkv_multihead *multihead,
                                          const qkv_multihead_gradients *gradients, void *scratch, size_t bytes);

/* Fills *problem, whose size is set, with the problem that attention got: multihead->attention with q, k, v, out and lse, views of
 * the activations (which are needed). With it qkv_scores gives the weights of chosen heads and rows, or of all, and qkv_describe
 * says how attention runs. */
QKV_API qkv_status qkv_multihead_problem(const qkv_multihead *multihead, qkv_problem *problem);

/* ---- Helpers, all inline ------------------------------------------------------------------------------------------- */

static inline qkv_multihead qkv_multihead_default(void) {
  qkv_multihead m;
  memset(&m, 0, sizeof m);
  m.size = (uint32_t)sizeof m;
  return m;
}
static inline qkv_multihead_gradients qkv_multihead_gradients_default(void) {
  qkv_multihead_gradients g;
  memset(&g, 0, sizeof g);
  g.size = (uint32_t)sizeof g;
  return g;
}
/* Contiguous (batch, seqlen, width): x, y. With cu_seqlens, packed rows. */
QKV_KEEPS_POINTER static inline qkv_tensor qkv_bsd(const void *data, int32_t dtype, int64_t seqlen, int64_t width) {
  return qkv_strided(data, dtype, seqlen * width, 0, width, 1);
}
/* Contiguous (row, column): weights. */
QKV_KEEPS_POINTER static inline qkv_tensor qkv_matrix(const void *data, int32_t dtype, int64_t columns) {
  return qkv_strided(data, dtype, 0, 0, columns, 1);
}
/* Contiguous vector: biases. */
QKV_KEEPS_POINTER static inline qkv_tensor qkv_vector(const void *data, int32_t dtype) {
  return qkv_strided(data, dtype, 0, 0, 0, 1);
}

#ifdef __cplusplus
}
#endif
#endif

/* Comparison of results: with the oracle, bit by bit, and by a digest. */
#ifndef QKV_SUPPORT_COMPARE_H
#define QKV_SUPPORT_COMPARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "qkv/qkv.h"

typedef struct compare_report {
  int64_t values, failures;
  double worst;   /* the largest error / bound */
  char text[256]; /* the first failure: where, computed, expected */
} compare_report;

/* Equal bits, or both NaN. The tensors' dtypes must be the same. */
bool compare_same_bits(const qkv_tensor *a, int64_t offset_a, const qkv_tensor *b, int64_t offset_b);

/* out and lse (where both have it) of two problems of the same extents; layouts may differ. */
bool compare_outputs(const qkv_problem *a, const qkv_problem *b, compare_report *report);

/* out and lse of a problem against the oracle. row_step > 1: every row_step-th row only. False
 * also if there is no memory. */
bool compare_oracle(const qkv_problem *p, int64_t row_step, compare_report *report);

/* dq, dk, dv, dbias and dsinks (where both have it) of two problems of the same extents, summed over the same axes; layouts may
 * differ. Elements of dbias that only other entries of a ragged batch have are left out. */
bool compare_gradients(const qkv_problem *a, const qkv_gradients *ga, const qkv_problem *b, const qkv_gradients *gb,
                       compare_report *report);

/* Gradients against the oracle; before: as for oracle_gradients_make. */
bool compare_gradients_oracle(const qkv_problem *p, const qkv_gradients *g, const qkv_gradients *before,
                              compare_report *report);

/* 64-bit FNV-1a over the values of out and lse in the order of their indices, least significant byte first whatever the host
 * is, all NaNs as one. */
uint64_t compare_digest(const qkv_problem *p);
/* The same over the gradients that are there. */
uint64_t compare_gradients_digest(const qkv_problem *p, const qkv_gradients *g);

#endif

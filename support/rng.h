/* Counter-based random numbers: a value is a function of (seed, stream, index), so that any element of a tensor can be
 * made alone and on any host. Only integer arithmetic and exact floating-point operations are used. */
#ifndef QKV_SUPPORT_RNG_H
#define QKV_SUPPORT_RNG_H

#include <stdbool.h>
#include <stdint.h>

/* A bijection of 64-bit words that scatters neighbours (the finaliser of splitmix64). */
static inline uint64_t rng_mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
static inline uint64_t rng_at(uint64_t seed, uint64_t stream, uint64_t index) {
  return rng_mix(index ^ rng_mix(stream ^ rng_mix(seed)));
}

/* In [0, 1), a multiple of 2^-53. */
static inline double rng_uniform_at(uint64_t seed, uint64_t stream, uint64_t index) {
  return (double)(rng_at(seed, stream, index) >> 11) * 0x1p-53;
}

/* Bell-shaped about 0 with standard deviation 1.15, within +-4: the sum of four uniform 16-bit numbers, and low bits from a
 * second word so that the significand is full. */
static inline double rng_normal_at(uint64_t seed, uint64_t stream, uint64_t index) {
  uint64_t w = rng_at(seed, stream, index);
  int64_t sum = (int64_t)(w & 0xffff) + (int64_t)(w >> 16 & 0xffff) + (int64_t)(w >> 32 & 0xffff) + (int64_t)(w >> 48);
  double low = (double)(rng_mix(w) >> 32) * 0x1p-32;
  return ((double)(sum - 131070) + low) * 0x1p-15;
}

/* The same numbers one after another. */
typedef struct rng {
  uint64_t seed, stream, count;
} rng;

static inline uint64_t rng_next(rng *r) { return rng_at(r->seed, r->stream, r->count++); }
/* 0 <= result < n, n >= 1. The bias of the remainder is below 2^-32 for the n used here. */
static inline int64_t rng_below(rng *r, int64_t n) { return (int64_t)(rng_next(r) % (uint64_t)n); }
/* lo <= result <= hi. */
static inline int64_t rng_range(rng *r, int64_t lo, int64_t hi) { return lo + rng_below(r, hi - lo + 1); }
static inline bool rng_chance(rng *r, int percent) { return rng_below(r, 100) < percent; }

#endif

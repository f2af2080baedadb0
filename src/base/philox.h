/* Philox4x32-10 of Random123 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011): four random words,
 * a function of counter and key. */
#ifndef QKV_BASE_PHILOX_H
#define QKV_BASE_PHILOX_H

#include <stdint.h>

#include "base/port.h"

QKV_INLINE void qkv__philox(const uint32_t counter[4], uint64_t key, uint32_t word[4]) {
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32), c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = UINT64_C(0xD2511F53) * c0, p1 = UINT64_C(0xCD9E8D57) * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)p1;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  word[0] = c0;
  word[1] = c1;
  word[2] = c2;
  word[3] = c3;
}

#endif

/* BACKWARD of docs/NUMERICS.md written a second time, from the text and for whole matrices, sharing nothing with src/. It is
 * slow and takes memory for every score; it gives the same bits or one of the two has misread the text. */
#ifndef QKV_TESTS_BACKWARD_SECOND_H
#define QKV_TESTS_BACKWARD_SECOND_H

#include <stdbool.h>

#include "qkv/qkv.h"

/* False: no memory. */
bool second_backward(const qkv_problem *p, const qkv_gradients *g);

#endif

#include "model.h"

#define LM_REAL double
#define LM(name) name##_f64
#define LM_DTYPE QKV_F64
#define LM_GEMM cblas_dgemm
#define LM_EXP exp
#include "model.inc"

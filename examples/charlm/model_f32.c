#include "model.h"

#define LM_REAL float
#define LM(name) name##_f32
#define LM_DTYPE QKV_F32
#define LM_GEMM cblas_sgemm
#define LM_EXP expf
#include "model.inc"

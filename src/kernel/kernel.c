/* One instance of the template: the build defines QKV__ISA_NAME and QKV__ISA_HEADER per instruction set, and QKV__F64 for
 * f64. */
#include "kernel/kernel.h"

#include "base/fma.h"
#include "base/half.h"
#include "base/order1.h"
#include "base/port.h"

#define V QKV_INLINE
#ifdef QKV__F64
typedef double real;
#define REAL_MAX    DBL_MAX
#define C(name)     name##_F64
#define QKV__SUFFIX f64
#define scalar_fma  qkv__fma64
#else
typedef float real;
#define REAL_MAX    FLT_MAX
#define C(name)     name##_F32
#define QKV__SUFFIX f32
#define scalar_fma  qkv__fma32
#endif

#include QKV__ISA_HEADER

#include "kernel/kernel.inc"

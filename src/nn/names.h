/* qkv-nn has copies of some of libqkv's internal functions, under names of its own: it uses nothing of libqkv but what is public, and
 * any of the two may be shared or static. Included before them. */
#ifndef QKV_NN_NAMES_H
#define QKV_NN_NAMES_H

#define qkv__fail           qkv_nn__fail
#define qkv__take_struct    qkv_nn__take_struct
#define qkv__check_tensor   qkv_nn__check_tensor
#define qkv__check_apart    qkv_nn__check_apart
#define qkv__dtype_bytes    qkv_nn__dtype_bytes
#define qkv__dtype_name     qkv_nn__dtype_name
#define qkv__run            qkv_nn__run
#define qkv__memory_take    qkv_nn__memory_take
#define qkv__memory_release qkv_nn__memory_release

#endif

/* The threads of libqkv in the race: an executor on OpenMP, as a C program would have it. */
#include <qkv/openmp.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT void qkv_peer_context(qkv_context *context, int threads);
EXPORT void qkv_peer_sizes(size_t sizes[5]);

void qkv_peer_context(qkv_context *context, int threads) {
  *context = qkv_context_default();
  if (threads > 1) qkv_openmp(context, threads);
}

/* What the structs of qkv_ctypes.py are compared with. */
void qkv_peer_sizes(size_t sizes[5]) {
  sizes[0] = sizeof(qkv_tensor);
  sizes[1] = sizeof(qkv_mask);
  sizes[2] = sizeof(qkv_problem);
  sizes[3] = sizeof(qkv_context);
  sizes[4] = sizeof(qkv_gradients);
}

/* States: nodes of the key tree in the caller's memory. */
#ifndef QKV_ATTENTION_STATE_H
#define QKV_ATTENTION_STATE_H

#include "attention/panel.h"

/* 0 if the context's isa_cap names nothing. */
int qkv__engine_make(const qkv_context *c, const qkv__problem *p, qkv__engine *g);
/* Whether the state has room for the nodes that the problem's keys make, the largest that tile them; their number. */
qkv_status qkv__state_fits(const qkv__problem *p, const qkv_state *s, int64_t *nodes);
/* Fills in these nodes. */
void qkv__state_nodes(const qkv__problem *p, qkv_state *s);
/* Root and FINISH of all rows. */
size_t qkv__finish_worker_bytes(const qkv__engine *g, int64_t nodes);
qkv_status qkv__finish_state(const qkv_context *c, const qkv__engine *g, const qkv_state *s, char *worker_memory,
                             size_t worker_bytes);

#endif

#include "attention/tree.h"

int qkv__tree_ancestor(qkv_node a, qkv_node b) {
  int h = (int)(a.level > b.level ? a.level : b.level);
  while (a.index >> (h - a.level) != b.index >> (h - b.level)) h++;
  return h;
}

int qkv__tree_spares(int64_t splits) {
  int n = 3;
  for (; splits > 1; splits = (splits + 1) / 2) n++;
  return n < QKV__TREE_DEPTH ? n : QKV__TREE_DEPTH;
}

qkv__tree_node qkv__tree_take(qkv__tree *t) { return t->spare[--t->spares]; }

static void merge_top(qkv__tree *t, const qkv__kernel *k, int64_t dv, int nv) {
  qkv__tree_node *a = &t->stack[t->depth - 2], *b = a + 1;
  const int level = qkv__tree_ancestor(a->at, b->at);
  k->merge(a->O, a->m, a->l, b->O, b->m, b->l, dv, nv);
  a->at.index >>= level - a->at.level;
  a->at.level = level;
  t->spare[t->spares++] = *b;
  t->depth--;
}

void qkv__tree_push(qkv__tree *t, qkv__tree_node n, const qkv__kernel *k, int64_t dv, int nv) {
  while (t->depth >= 2 && qkv__tree_ancestor(t->stack[t->depth - 2].at, t->stack[t->depth - 1].at) <
                              qkv__tree_ancestor(t->stack[t->depth - 1].at, n.at))
    merge_top(t, k, dv, nv);
  t->stack[t->depth++] = n;
}

void qkv__tree_root(qkv__tree *t, const qkv__kernel *k, int64_t dv, int nv) {
  while (t->depth >= 2) merge_top(t, k, dv, nv);
}

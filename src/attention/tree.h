/* TREE of docs/NUMERICS.md without a counter: nodes arrive ascending by position; two neighbours merge as soon as no later
 * node can come between them, that is, when their lowest common ancestor lies below the newcomer's. Merging with an empty
 * node changes nothing, so the result is that of the full binary tree over absolute indices. */
#ifndef QKV_ATTENTION_TREE_H
#define QKV_ATTENTION_TREE_H

#include <qkv/qkv.h>

#include "kernel/kernel.h"

enum { QKV__TREE_DEPTH = 28 }; /* positions below 2^31: 22 levels of splits, and slack */

/* One node of a panel: O^T[dv][w], m[w], l[w] */
typedef struct qkv__tree_node {
  qkv_node at;
  void *O, *m, *l;
} qkv__tree_node;

/* Pending nodes, ascending; and spare memory. `spare` holds what stack does not. */
typedef struct qkv__tree {
  int depth, spares;
  qkv__tree_node stack[QKV__TREE_DEPTH], spare[QKV__TREE_DEPTH];
} qkv__tree;

/* Level of the lowest common ancestor of two nodes, neither inside the other. */
int qkv__tree_ancestor(qkv_node a, qkv_node b);
/* Spare nodes a tree over `splits` neighbouring splits needs, the one being filled included. */
int qkv__tree_spares(int64_t splits);
qkv__tree_node qkv__tree_take(qkv__tree *t);
void qkv__tree_push(qkv__tree *t, qkv__tree_node n, const qkv__kernel *k, int64_t dv, int nv);
/* Merges all into stack[0]; depth becomes 1, or stays 0. */
void qkv__tree_root(qkv__tree *t, const qkv__kernel *k, int64_t dv, int nv);

#endif

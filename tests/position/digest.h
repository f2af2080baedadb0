/* Digests of what the functions of positions give, committed in digests.txt, so that machines that never meet are compared. Needs
 * the library and support/ alone. */
#ifndef QKV_TESTS_POSITION_DIGEST_H
#define QKV_TESTS_POSITION_DIGEST_H

/* Compares with the file and prints what differs and a summary. 0: all equal; 1: not; 2: the file is wrong. */
int position_digest_compare(const char *path);
/* Writes the file: only when cases are added. */
int position_digest_write(const char *path);

#endif

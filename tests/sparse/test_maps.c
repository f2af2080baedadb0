#include "pattern.h"
static void test_nothing(void **state) { (void)state; }
static const struct CMUnitTest tests[] = {cmocka_unit_test(test_nothing)};
TEST_MAIN(tests)

#include "greet.h"

const char *greet(void) { return WORD; }
const char *greet_file(void) { return __FILE__; }

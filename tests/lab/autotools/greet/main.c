#include <stdio.h>
#include "greet.h"

int main(void) {
    puts(greet());
    return 0;
}

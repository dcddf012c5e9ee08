#include <stdio.h>
#include <greet.h>

int main(void) {
    printf("%s, called\n", greet());
    return 0;
}

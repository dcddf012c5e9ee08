/* Stands in for the driver's library: GPUs of the chips in CHIPS ("90 80"). */
#include <stdio.h>
#include <stdlib.h>

static int chips[8], count = -1;

int cuInit(unsigned flags) {
    const char *text = getenv("CHIPS");
    count = 0;
    for (int size = 0; text && count < 8 && sscanf(text, "%d%n", &chips[count], &size) == 1; text += size) count++;
    return flags != 0;
}
int cuDeviceGetCount(int *found) { return count < 0 ? 3 : (*found = count, 0); }
int cuDeviceGet(int *device, int number) { return number < count ? (*device = number, 0) : 101; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device >= count || (attribute != 75 && attribute != 76)) return 1;
    *value = attribute == 75 ? chips[device] / 10 : chips[device] % 10;
    return 0;
}

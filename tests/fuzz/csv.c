/* The reader of data/ladder.csv, on a file of any bytes. */
#include <stdio.h>
static FILE *contents;
static FILE *opened(void) { return contents; }
#define main driver_main
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdlib.h>
#define fopen(path, mode) opened()
#include "driver.c"
#undef main
#undef fopen

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char cell[256], *line;
    contents = size ? fmemopen((void *)data, size, "r") : NULL;
    last_figures();
    line = malloc(size + 1);
    memcpy(line, data, size), line[size] = 0;
    for (int i = 0; i < 20; i++) {
        field(line, i, cell);
        if (strlen(cell) > 255) abort();
    }
    free(line);
    return 0;
}

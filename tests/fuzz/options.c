/* The driver's command line: words apart by zero bytes. What is accepted is within its limits, and
   no size computed from it overflows. */
#include <setjmp.h>
#include <stdlib.h>
static jmp_buf left;
static void leave(int code) { (void)code; longjmp(left, 1); }
#define exit(code) leave(code)
#define main driver_main
#include "driver.c"
#undef main

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct options fresh;
    static int known;
    char text[1024], *words[64] = { "driver" };
    int n = 1;
    if (!known) fresh = opt, known = 1;
    opt = fresh, shape_given = 0;
    if (size >= sizeof text) return 0;
    memcpy(text, data, size), text[size] = 0;
    for (size_t at = 0; at < size && n < 63; at += strlen(text + at) + 1) words[n++] = text + at;
    if (setjmp(left)) return 0;
    read_options(n, words);
    const layer_config *c = &opt.c;
    if (c->d < 1 || c->ffn < 1 || c->n_q < 1 || c->n_kv < 1 || c->hd < 1 || opt.prefill < 0
        || (!opt.at && c->max_seq_len <= opt.prefill) || opt.samples < 3 || opt.samples > 1000) abort();
    struct set s = { 0 };
    if (place_tensors(&s) <= 0) abort();
    if (s.tensor[V_CACHE] < s.tensor[K_CACHE]) abort();
    return 0;
}

/* Codes of 1 to 16 bits as a little-endian bit stream, each row of them from a byte on.
 * Oracle: qgnn.reference.codes_pack, codes_unpack.
 */

#include "common.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the first byte of a word has to be its lowest"
#endif

/* Eight codes, which fill as many bytes as a code has bits, are a group. A piece of a row is some groups. */
enum { GROUP = 8, PIECE = 1 << 13 };

/* Codes have one byte up to 8 bits; above two, or four if they are unpacked without a sign. */
typedef struct {
    uint8_t *stored;
    void *codes;
    int64_t R, C, bits;
    int is_signed, unpacks;
} task;

/* ---- words of codes, each in a lane of 8 or 16 bits ---- */

/* A word whose lanes have their lowest `used` of `width` bits set. */
INLINE uint64_t lanes(const int width, const int used) {
    const uint64_t lowest = width == 64 ? 1 : ~0ull / ((1ull << width) - 1);
    return lowest * (~0ull >> (64 - used));
}

/* Pushes pairs of lanes, of which `used` bits count, together into lanes of twice the width; and apart again. */
INLINE uint64_t join_pairs(uint64_t word, const int width, const int used) {
    const uint64_t low = word & lanes(2 * width, used);
    return (word ^ low) >> (width - used) | low;
}

INLINE uint64_t split_pairs(uint64_t word, const int width, const int used) {
    const uint64_t low = word & lanes(2 * width, used);
    return (word ^ low) << (width - used) | low;
}

INLINE uint64_t join_lanes(uint64_t word, const int lane, const int bits) {
    word &= lanes(lane, bits);
    if (lane == 8) word = join_pairs(word, 8, bits);
    word = join_pairs(word, 16, 16 / lane * bits);
    return join_pairs(word, 32, 32 / lane * bits);
}

/* With a sign copied to the upper bits of its lane. */
INLINE uint64_t split_lanes(uint64_t word, const int lane, const int bits, const int is_signed) {
    word &= lanes(64, 64 / lane * bits);
    word = split_pairs(word, 32, 32 / lane * bits);
    word = split_pairs(word, 16, 16 / lane * bits);
    if (lane == 8) word = split_pairs(word, 8, bits);
    if (!is_signed || bits == lane) return word;
    const uint64_t sign = word >> (bits - 1) & lanes(lane, 1);
    return word | ((sign << lane) - (sign << bits));
}

/* A word whose first bytes are those. */
INLINE uint64_t load_word(const void *bytes, int64_t count) {
    uint64_t word = 0;
    memcpy(&word, bytes, (size_t)count);
    return word;
}

/* ---- groups, of which a row's last one may lack some codes ---- */

INLINE int64_t code_bytes(const int bits, const int is_signed) { return bits <= 8 ? 1 : is_signed ? 2 : 4; }

INLINE int64_t bytes_of(int64_t count, int64_t bits) { return (count * bits + 7) / 8; }

INLINE void pack_group(uint8_t *stored, const char *codes, int64_t count, const int bits) {
    uint64_t words[2] = {0};
    if (bits <= 8) words[0] = join_lanes(load_word(codes, count), 8, bits);
    else {
        const int64_t first = min_i64(count, 4);
        const uint64_t low = join_lanes(load_word(codes, 2 * first), 16, bits);
        const uint64_t high = join_lanes(load_word(codes + 2 * first, 2 * (count - first)), 16, bits);
        words[0] = bits == 16 ? low : low | high << 4 * bits;
        words[1] = bits == 16 ? high : high >> (64 - 4 * bits);
    }
    memcpy(stored, words, (size_t)bytes_of(count, bits));
}

/* Reads all bytes of one word, or of two. */
INLINE void unpack_group(char *codes, const uint8_t *stored, int64_t count, const int bits, const int is_signed) {
    const uint64_t first = load_word(stored, 8);
    if (bits <= 8) {
        const uint64_t word = split_lanes(first, 8, bits, is_signed);
        memcpy(codes, &word, (size_t)count);
        return;
    }
    const uint64_t second = load_word(stored + 8, 8);
    const uint64_t rest = bits == 16 ? second : first >> 4 * bits | second << (64 - 4 * bits);
    const uint64_t low = split_lanes(first, 16, bits, is_signed), high = split_lanes(rest, 16, bits, is_signed);
    if (is_signed) memcpy(codes, (const uint64_t[2]){low, high}, (size_t)(2 * count));
    else {
        const uint64_t words[4] = {low & UINT32_MAX, low >> 32, high & UINT32_MAX, high >> 32};
        uint64_t wide[4];
        for (int i = 0; i < 4; i++) wide[i] = split_pairs(words[i], 32, 16);
        memcpy(codes, wide, (size_t)(4 * count));
    }
}

/* ---- pieces of rows ---- */

INLINE void pack_piece(uint8_t *stored, const char *codes, int64_t count, const int bits) {
    const int64_t size = GROUP * code_bytes(bits, 1), whole = count / GROUP;
    for (int64_t g = 0; g < whole; g++) pack_group(stored + g * bits, codes + g * size, GROUP, bits);
    if (count % GROUP) pack_group(stored + whole * bits, codes + whole * size, count % GROUP, bits);
}

/* Of `known` bytes from `stored` on: groups behind which these do not fill the words are copied first. */
INLINE void unpack_piece(
    char *codes, const uint8_t *stored, int64_t known, int64_t count, const int bits, const int is_signed
) {
    const int64_t size = GROUP * code_bytes(bits, is_signed), words = bits <= 8 ? 8 : 16;
    const int64_t whole = min_i64(count / GROUP, known < words ? 0 : (known - words) / bits + 1);
    for (int64_t g = 0; g < whole; g++) unpack_group(codes + g * size, stored + g * bits, GROUP, bits, is_signed);
    for (int64_t g = whole; g * GROUP < count; g++) {
        const int64_t left = min_i64(GROUP, count - g * GROUP);
        uint8_t copy[16] = {0};
        memcpy(copy, stored + g * bits, (size_t)bytes_of(left, bits));
        unpack_group(codes + g * size, copy, left, bits, is_signed);
    }
}

INLINE void run_piece(
    const task *job, int64_t r, int64_t first, const int bits, const int is_signed, const int unpacks
) {
    const int64_t row_bytes = bytes_of(job->C, bits), count = min_i64(PIECE, job->C - first);
    const int64_t place = r * row_bytes + first / GROUP * bits;
    char *codes = (char *)job->codes + (r * job->C + first) * code_bytes(bits, is_signed);
    if (unpacks) unpack_piece(codes, job->stored + place, job->R * row_bytes - place, count, bits, is_signed);
    else pack_piece(job->stored + place, codes, count, bits);
}

/* The same with constants. It is called within the loop of threads, which is a function that sees none. */
static void run_piece_of(const task *job, int64_t r, int64_t first) {
#define CASE(BITS) \
    case BITS: \
        if (!job->unpacks) run_piece(job, r, first, BITS, 1, 0); \
        else if (job->is_signed) run_piece(job, r, first, BITS, 1, 1); \
        else run_piece(job, r, first, BITS, 0, 1); \
        break;
    switch (job->bits) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
    }
#undef CASE
}

static void run_rows(const task *job, int64_t threads) {
    const int64_t pieces = (job->C + PIECE - 1) / PIECE;
    threads = useful_threads(job->R * job->C, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t number = 0; number < job->R * pieces; number++)
        run_piece_of(job, number / pieces, number % pieces * PIECE);
}

EXPORT void qgnn_codes_pack(uint8_t *stored, const void *codes, int64_t R, int64_t C, int64_t bits, int64_t threads) {
    const task job = {.stored = stored, .codes = (void *)(uintptr_t)codes, .R = R, .C = C, .bits = bits};
    run_rows(&job, threads);
}

EXPORT void qgnn_codes_unpack(
    void *codes, const uint8_t *stored, int64_t R, int64_t C, int64_t bits, int64_t is_signed, int64_t threads
) {
    const task job = {
        .stored = (uint8_t *)(uintptr_t)stored, .codes = codes, .R = R, .C = C, .bits = bits,
        .is_signed = is_signed != 0, .unpacks = 1,
    };
    run_rows(&job, threads);
}

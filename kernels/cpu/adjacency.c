/* Sorted edges with some taken out, or with others put in among them.
 * Oracle: qgnn.reference.adjacency_filter, adjacency_merge. */

#include "common.h"

enum { WORD = 64 };

/* Which of 64 items are kept, a bit each, and how many of all before them. */
typedef struct {
    uint64_t kept;
    int64_t before;
} rank_word;

/* Edges in the order of their rows; `weight` may be null, `size` is that of one in bytes. `number`, if not null, is what
 * the other ends are to be called. */
typedef struct {
    const void *indptr, *index, *order, *weight;
    int64_t size;
    const void *number;
} sorted_edges;

/* Room for as many. */
typedef struct {
    void *indptr, *index, *order, *weight;
} new_edges;

/* Kept items before item i. */
INLINE int64_t rank_of(const rank_word *ranks, int64_t i) {
    const rank_word *word = ranks + i / WORD;
    return word->before + __builtin_popcountll(word->kept & ((1ull << (i % WORD)) - 1));
}

INLINE void store_index(void *index, int64_t i, int64_t value, const int wide) {
    if (wide) ((int64_t *)index)[i] = value;
    else ((int32_t *)index)[i] = (int32_t)value;
}

INLINE void copy_items(void *out, int64_t o, const void *items, int64_t i, int64_t n, int64_t size) {
    if (n) memcpy((char *)out + o * size, (const char *)items + i * size, (size_t)(n * size));
}

/* ---- edges taken out ---- */

/* Ranks of a mask [E]: E / 64 + 1 words, the last of what is left of E, which may be nothing. */
INLINE void rank_mask(rank_word *ranks, const uint8_t *mask, int64_t E, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t w = 0; w <= E / WORD; w++) {
        const int64_t first = w * WORD, count = min_i64(WORD, E - first);
        uint64_t bits = 0;
        for (int64_t i = 0; i < count; i++) bits |= (uint64_t)mask[first + i] << i;
        ranks[w].kept = bits;
    }
    int64_t before = 0;
    for (int64_t w = 0; w <= E / WORD; w++) {
        ranks[w].before = before;
        before += __builtin_popcountll(ranks[w].kept);
    }
}

/* Kept edges among first .. last, by the ranks of where they were given. */
INLINE int64_t count_kept(const rank_word *given, const void *order, int64_t first, int64_t last, const int wide) {
    int64_t count = 0;
    for (int64_t e = first; e < last; e++) {
        const int64_t place = load_index(order, e, wide);
        count += given[place / WORD].kept >> (place % WORD) & 1;
    }
    return count;
}

INLINE int64_t other_end(const sorted_edges *edges, int64_t e, const int wide) {
    const int64_t index = load_index(edges->index, e, wide);
    return edges->number ? load_index(edges->number, index, wide) : index;
}

/* Copies the kept edges of the words first .. last to o and on, while there is room; makes the mask and the ranks of
 * where they stood. Returns the end. */
INLINE int64_t filter_words(
    const new_edges *out, uint8_t *kept, rank_word *ranks, const sorted_edges *edges, const rank_word *given, int64_t E,
    int64_t first, int64_t last, int64_t o, int64_t room, const int wide
) {
    for (int64_t w = first; w < last; w++) {
        const int64_t e = w * WORD, count = min_i64(WORD, E - e);
        int64_t place[WORD];
        uint64_t bits = 0;
        for (int64_t i = 0; i < count; i++) {
            const uint64_t before = (uint64_t)load_index(edges->order, e + i, wide); /* unsigned: divided by a shift */
            const rank_word *word = given + before / WORD;
            const uint64_t up_to = word->kept << (WORD - 1 - before % WORD), is_kept = up_to >> (WORD - 1);
            place[i] = word->before + __builtin_popcountll(up_to) - 1;
            kept[e + i] = (uint8_t)is_kept;
            bits |= is_kept << i;
        }
        ranks[w] = (rank_word){bits, o};
        if (~bits == 0 && o + WORD <= room) {
            for (int64_t i = 0; i < WORD; i++) {
                store_index(out->index, o + i, other_end(edges, e + i, wide), wide);
                store_index(out->order, o + i, place[i], wide);
            }
            if (edges->weight) copy_items(out->weight, o, edges->weight, e, WORD, edges->size);
            o += WORD;
            continue;
        }
        for (; bits && o < room; bits &= bits - 1, o++) {
            const int64_t i = __builtin_ctzll(bits);
            store_index(out->index, o, other_end(edges, e + i, wide), wide);
            store_index(out->order, o, place[i], wide);
            if (edges->weight) copy_items(out->weight, o, edges->weight, e + i, 1, edges->size);
        }
        o += __builtin_popcountll(bits);
    }
    return o;
}

INLINE int64_t filter(
    const new_edges *out, uint8_t *kept, rank_word *ranks, const sorted_edges *edges, const rank_word *given, int64_t N,
    int64_t E, int64_t room, int64_t threads, const int wide
) {
    const int64_t words = E / WORD + 1, parts = min_i64(threads, words);
    int64_t starts[parts + 1]; /* where the edges of each part go */
    starts[0] = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts - 1; part++) {
        const int64_t first = words * part / parts * WORD, last = words * (part + 1) / parts * WORD;
        starts[part + 1] = count_kept(given, edges->order, first, last, wide);
    }
    for (int64_t part = 1; part < parts; part++) starts[part] += starts[part - 1];
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = words * part / parts, last = words * (part + 1) / parts;
        const int64_t end = filter_words(out, kept, ranks, edges, given, E, first, last, starts[part], room, wide);
        if (part == parts - 1) starts[parts] = end;
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n <= N; n++)
        store_index(out->indptr, n, rank_of(ranks, load_index(edges->indptr, n, wide)), wide);
    return starts[parts];
}

/* The edges that the mask `keep` has where they were given, and the mask `kept` of where they stood. `found` becomes
 * their number: no more than `room` are copied. `given` and `ranks` are work space of E / 64 + 1 words of 16 bytes. */
EXPORT void qgnn_adjacency_filter(
    void *out_indptr, void *out_index, void *out_order, void *out_weight, void *kept, int64_t *found, int64_t *given,
    int64_t *ranks, const void *indptr, const void *index, const void *order, const void *weight, const void *keep,
    const void *number, int64_t size, int64_t N, int64_t E, int64_t room, int64_t wide, int64_t threads
) {
    const new_edges out = {out_indptr, out_index, out_order, out_weight};
    const sorted_edges edges = {indptr, index, order, weight, size, number};
    rank_word *of_given = (rank_word *)given, *of_these = (rank_word *)ranks;
    threads = useful_threads(E, threads);
    rank_mask(of_given, keep, E, threads);
    if (wide) *found = filter(&out, kept, of_these, &edges, of_given, N, E, room, threads, 1);
    else *found = filter(&out, kept, of_these, &edges, of_given, N, E, room, threads, 0);
}

/* ---- edges put in ---- */

/* out[n] = indptr[n] + the new edges of rows before n. */
INLINE void merge_pointers(
    void *out, const void *indptr, const void *new_row, int64_t N, int64_t num_new, const int wide
) {
    memset(out, 0, (size_t)(N + 1) * (wide ? 8 : 4));
    for (int64_t i = 0; i < num_new; i++) {
        const int64_t behind = load_index(new_row, i, wide) + 1;
        store_index(out, behind, load_index(out, behind, wide) + 1, wide);
    }
    int64_t before = 0;
    for (int64_t n = 0; n <= N; n++) {
        before += load_index(out, n, wide);
        store_index(out, n, load_index(indptr, n, wide) + before, wide);
    }
}

INLINE void copy_edges(const new_edges *out, int64_t o, const sorted_edges *edges, int64_t e, int64_t n, const int wide) {
    copy_items(out->index, o, edges->index, e, n, wide ? 8 : 4);
    copy_items(out->order, o, edges->order, e, n, wide ? 8 : 4);
    if (edges->weight) copy_items(out->weight, o, edges->weight, e, n, edges->size);
}

INLINE int64_t clamp(int64_t value, int64_t low, int64_t high) { return max_i64(low, min_i64(value, high)); }

/* First edge of e .. stop whose order is not below `key`. */
INLINE int64_t place_of(const void *order, int64_t key, int64_t e, int64_t stop, const int wide) {
    while (e < stop) {
        const int64_t middle = e + (stop - e) / 2;
        if (load_index(order, middle, wide) < key) e = middle + 1;
        else stop = middle;
    }
    return e;
}

/* The rows first .. last. Clamped, as rows of new edges that do not ascend must not lead outside. */
INLINE void merge_rows(
    const new_edges *out, const sorted_edges *old, const sorted_edges *added, const void *new_row, int64_t first,
    int64_t last, const int wide
) {
    const int64_t stop = load_index(old->indptr, last, wide), new_stop = load_index(out->indptr, last, wide) - stop;
    int64_t e = load_index(old->indptr, first, wide), i = load_index(out->indptr, first, wide) - e;
    for (; i < new_stop; i++) {
        const int64_t n = load_index(new_row, i, wide);
        const int64_t begin = clamp(load_index(old->indptr, n, wide), e, stop);
        const int64_t end = clamp(load_index(old->indptr, n + 1, wide), begin, stop);
        const int64_t place = place_of(old->order, load_index(added->order, i, wide), begin, end, wide);
        copy_edges(out, e + i, old, e, place - e, wide);
        copy_edges(out, place + i, added, i, 1, wide);
        e = place;
    }
    copy_edges(out, e + i, old, e, stop - e, wide);
}

INLINE void merge(
    const new_edges *out, const sorted_edges *old, const sorted_edges *added, const void *new_row, int64_t N,
    int64_t num_new, int64_t threads, const int wide
) {
    merge_pointers(out->indptr, old->indptr, new_row, N, num_new, wide);
    threads = useful_threads(load_index(out->indptr, N, wide), threads);
    const int64_t parts = num_parts(N, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part_of_rows(out->indptr, N, part, parts, wide);
        merge_rows(out, old, added, new_row, first, part_of_rows(out->indptr, N, part + 1, parts, wide), wide);
    }
}

/* All edges: new ones, whose rows and orders ascend, go where their order has them within their row. */
EXPORT void qgnn_adjacency_merge(
    void *out_indptr, void *out_index, void *out_order, void *out_weight, const void *indptr, const void *index,
    const void *order, const void *weight, const void *new_row, const void *new_index, const void *new_order,
    const void *new_weight, int64_t size, int64_t N, int64_t num_new, int64_t wide, int64_t threads
) {
    const new_edges out = {out_indptr, out_index, out_order, out_weight};
    const sorted_edges old = {indptr, index, order, weight, size, 0};
    const sorted_edges added = {0, new_index, new_order, new_weight, size, 0};
    if (wide) merge(&out, &old, &added, new_row, N, num_new, threads, 1);
    else merge(&out, &old, &added, new_row, N, num_new, threads, 0);
}

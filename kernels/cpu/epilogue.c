/* Rows behind an activation. Oracle: qgnn.reference.activation. */

#include "epilogue.h"

/* Rows y [R, F] in place; `row` is the number of the first one. */
EXPORT void qgnn_epilogue_activate(
    float *y, uint8_t *mask, int64_t relu, int64_t threshold, const int64_t *seed, int64_t stream_key, float factor,
    int64_t row, int64_t R, int64_t F, int64_t threads
) {
    const activation a = make_activation(mask, relu, threshold, seed, stream_key, factor);
    threads = useful_threads(R * F, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < R; r++) activate_columns(y + r * F, a, row + r, 0, F, F);
}

/* How the library was compiled. */

#include "common.h"

/* What the flags of build.py came to: 1 or 0 each. */
EXPORT void qgnn_info(int64_t *openmp, int64_t *native, int64_t threads) {
#ifdef _OPENMP
    *openmp = 1;
#else
    *openmp = 0;
#endif
#ifdef QGNN_NATIVE
    *native = 1;
#else
    *native = 0;
#endif
}

// Kernels for one instruction set; see build.py for its flags. Nothing but C headers: an inline library function
// compiled here could become everyone's copy.
#include "tandem_cpu.h"

#if defined(TD_EMULATED_AVX512) || (defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__))
#if defined(TD_EMULATED_AVX512)
#include "simde/x86/avx512.h"
#else
#include <immintrin.h>
#endif
#define TD_NS tdk_avx512
#define TD_NAME "avx512"
#define TD_HAS_BF16 0

namespace {
namespace TD_NS {
#include "simd_avx512.inl"

#include "rows.inl"

#include "attention.inl"
#include "linear.inl"
#include "sampling.inl"
#include "table.inl"
}  // namespace TD_NS
}  // namespace

extern "C" const TdKernels* td_table_avx512() { return &TD_NS::kTable; }
#else
extern "C" const TdKernels* td_table_avx512() { return 0; }
#endif

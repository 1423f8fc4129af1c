// The two products of attention, q . k and p . v, for R queries of one KV head. Layouts of a group of 16 slots: fp32 and
// int8 have K as [head_dim][16] and V as [16][head_dim]; bf16 interleaves pairs, K as [head_dim / 2][16][2] and V as
// [8][head_dim][2]: what a bf16 dot product reads, and what a shift or a mask widens to fp32. A score's lane is a
// position and its sum runs over head_dim in order; an output's lane is a dimension and its sum runs over positions in
// order.

#if TD_HAS_BF16
#define TD_DOT_ATTENTION 1
#else
#define TD_DOT_ATTENTION 0
#endif
#define TD_INLINE static inline __attribute__((always_inline))

// How a cache of type T is multiplied: as fp32, or as bf16 pairs where the CPU has their dot product.
template <class T>
struct Products {
  static const bool DOT = TD_DOT_ATTENTION && sizeof(T) == 2;
  static const int STEP = sizeof(T) == 2 ? 2 : 1;  // elements that lie interleaved
  static const int CACHE = DOT ? 2 : 3;  // what to fetch into: L2, which has room for more misses, or L1
  // Groups (or blocks of 16 columns) at once for few queries: chains of sums that hide each other's latency.
  static constexpr int columns(int rows) { return DOT ? (rows <= 6 ? 4 : 2) : 2 * rows <= TD_ROWS_A ? 2 : 1; }
};

template <class T>
static inline void fetch(const T* p, int64_t count) {
  for (int64_t i = 0; i < count * (int64_t)sizeof(T); i += 64) __builtin_prefetch((const char*)p + i, 0, Products<T>::CACHE);
}

TD_INLINE vf ld_half(const float* p, int) { return ld(p); }
TD_INLINE vf ld_half(const int8_t* p, int) { return ld_i8(p); }
// The first or the second bf16 of 16 pairs.
TD_INLINE vf ld_half(const uint16_t* p, int half) {
  vi w = ldi((const int32_t*)p);
  return half ? bits(andi(w, set1i(-65536))) : bits(shl<16>(w));
}

// acc[r][c] += x[r][i] * w[c], and for pairs then x[r][i + 1] * its second. ALONE: the second does not count, and what
// is stored there may be anything. x: fp32, or bf16 if DOT.
template <int R, int C, bool ALONE, class T>
TD_INLINE void multiply(const float* const* x, int64_t i, const T* const (&w)[C], vf (&acc)[R][C]) {
#if TD_DOT_ATTENTION
  if constexpr (Products<T>::DOT) {
    __m512i v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      v[c] = _mm512_loadu_si512(w[c]);
      if (ALONE) v[c] = _mm512_and_si512(v[c], _mm512_set1_epi32(65535));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      int32_t word;
      __builtin_memcpy(&word, (const uint16_t*)x[r] + i, 4);
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(word);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c].v = _mm512_dpbf16_ps(acc[r][c].v, (__m512bh)v[c], pair);
    }
    return;
  }
#endif
#pragma GCC unroll 2
  for (int half = 0; half < (ALONE ? 1 : Products<T>::STEP); half++) {
    vf v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) v[c] = ld_half(w[c], half);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      vf y = set1(x[r][i + half]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = fma(y, v[c], acc[r][c]);
    }
  }
}

// s[r][at + 16 c ..] = scale * (q[r] . k[c]) for R queries and C groups of 16 positions; DOT has the scale in q. ahead:
// per group what to fetch meanwhile, as much as is read.
template <int R, int C, class T, bool AHEAD>
static inline void score_rows(const float* const* q, const T* const* k, int64_t dim, float scale, int64_t at,
                              float* const* s, const T* const* ahead) {
  vf acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = set1(0.0f);
  const T* w[C];
  for (int c = 0; c < C; c++) w[c] = k[c];
  // Unrolled, the compiler would spill sums.
#pragma GCC unroll 1
  for (int64_t d = 0; d < dim; d += Products<T>::STEP) {
    if (AHEAD)
      for (int c = 0; c < C; c++) fetch(ahead[c] + d * 16, 16 * Products<T>::STEP);
    multiply<R, C, false, T>(q, d, w, acc);
    for (int c = 0; c < C; c++) w[c] += 16 * Products<T>::STEP;
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) st(s[r] + at + c * 16, Products<T>::DOT ? acc[r][c] : mul(acc[r][c], set1(scale)));
}

// o[r][d .. d + 16 C) += sum over n positions of p[r][i] * v[i][d ..]. SPAN: positions that lie one after another.
template <int R, int C, class T, int SPAN>
static inline void value_columns(const float* const* p, const T* const* groups, int64_t n, int64_t dim, int64_t d,
                                 float* const* o, const T* const* ahead) {
  const int STEP = Products<T>::STEP;
  vf acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = ld(o[r] + d + c * 16);
  for (int64_t g = 0; g * SPAN < n; g++) {
    const T* next = ahead ? ahead[g] : nullptr;
    const int64_t end = n - g * SPAN < SPAN ? n - g * SPAN : SPAN;
    const T* w[C];
    for (int c = 0; c < C; c++) w[c] = groups[g] + (d + c * 16) * STEP;
    int64_t i = 0;
#pragma GCC unroll 1
    for (; i + STEP <= end; i += STEP) {
      if (next) fetch(next + i * dim + d * STEP, C * 16 * STEP);
      multiply<R, C, false, T>(p, g * SPAN + i, w, acc);
      for (int c = 0; c < C; c++) w[c] += dim * STEP;
    }
    if (STEP == 2 && i < end) multiply<R, C, true, T>(p, g * SPAN + i, w, acc);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) st(o[r] + d + c * 16, acc[r][c]);
}

template <int R, class T>
static inline void score_tile(const float* const* q, const T* const* k, int64_t groups, int64_t dim, float scale,
                              float* const* s, const T* const* ahead) {
  constexpr int C = Products<T>::columns(R);
  int64_t g = 0;
  for (; g + C <= groups; g += C) {
    if (ahead)
      score_rows<R, C, T, true>(q, k + g, dim, scale, g * 16, s, ahead + g);
    else
      score_rows<R, C, T, false>(q, k + g, dim, scale, g * 16, s, nullptr);
  }
  for (; g < groups; g++) {
    if (ahead)
      score_rows<R, 1, T, true>(q, k + g, dim, scale, g * 16, s, ahead + g);
    else
      score_rows<R, 1, T, false>(q, k + g, dim, scale, g * 16, s, nullptr);
  }
}
template <int R, class T, int SPAN>
static inline void value_tile(const float* const* p, const T* const* groups, int64_t n, int64_t dim, float* const* o,
                              const T* const* ahead) {
  constexpr int C = Products<T>::columns(R);
  int64_t d = 0;
  for (; d + C * 16 <= dim; d += C * 16) value_columns<R, C, T, SPAN>(p, groups, n, dim, d, o, ahead);
  for (; d < dim; d += 16) value_columns<R, 1, T, SPAN>(p, groups, n, dim, d, o, ahead);
}

// The same for n queries of at most TD_ROWS_A.
template <int R, class T>
static inline void score_some(int64_t n, const float* const* q, const T* const* k, int64_t groups, int64_t dim,
                              float scale, float* const* s, const T* const* ahead) {
  if constexpr (R > 0) {
    if (n == R)
      score_tile<R, T>(q, k, groups, dim, scale, s, ahead);
    else
      score_some<R - 1, T>(n, q, k, groups, dim, scale, s, ahead);
  }
}
template <int R, class T, int SPAN>
static inline void value_some(int64_t n, const float* const* p, const T* const* v, int64_t positions, int64_t dim,
                              float* const* o, const T* const* ahead) {
  if constexpr (R > 0) {
    if (n == R)
      value_tile<R, T, SPAN>(p, v, positions, dim, o, ahead);
    else
      value_some<R - 1, T, SPAN>(n, p, v, positions, dim, o, ahead);
  }
}

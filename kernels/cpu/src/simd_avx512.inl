// Sixteen lanes as one AVX-512 register; VNNI and BF16 dot products. Included inside an anonymous namespace.
#define TD_ROWS_Q 8
#define TD_ROWS_F 12
#define TD_ROWS_A 12
// Weights into L2, which has room for more misses.
#define TD_AHEAD 4096
#define TD_AHEAD_CACHE 2

struct vf {
  __m512 v;
};
struct vi {
  __m512i v;
};
struct vm {
  __mmask16 m;
};

static inline vf ld(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void st(float* p, vf x) { _mm512_storeu_ps(p, x.v); }
static inline vf set1(float x) { return {_mm512_set1_ps(x)}; }
static inline vi set1i(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline vi ldi(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline vf add(vf x, vf y) { return {_mm512_add_ps(x.v, y.v)}; }
static inline vf sub(vf x, vf y) { return {_mm512_sub_ps(x.v, y.v)}; }
static inline vf mul(vf x, vf y) { return {_mm512_mul_ps(x.v, y.v)}; }
static inline vf div(vf x, vf y) { return {_mm512_div_ps(x.v, y.v)}; }
static inline vf vmax(vf x, vf y) { return {_mm512_max_ps(x.v, y.v)}; }
static inline vf vmin(vf x, vf y) { return {_mm512_min_ps(x.v, y.v)}; }
static inline vf fma(vf x, vf y, vf z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
static inline vf vabs(vf x) { return {_mm512_abs_ps(x.v)}; }
static inline vf cvt(vi x) { return {_mm512_cvtepi32_ps(x.v)}; }
static inline vi rnd(vf x) { return {_mm512_cvtps_epi32(x.v)}; }
static inline vi addi(vi x, vi y) { return {_mm512_add_epi32(x.v, y.v)}; }
static inline vi subi(vi x, vi y) { return {_mm512_sub_epi32(x.v, y.v)}; }
static inline vi xori(vi x, vi y) { return {_mm512_xor_si512(x.v, y.v)}; }
static inline vi andi(vi x, vi y) { return {_mm512_and_si512(x.v, y.v)}; }
template <int S>
static inline vi shl(vi x) {
  return {_mm512_slli_epi32(x.v, S)};
}
template <int S>
static inline vi shr(vi x) {
  return {_mm512_srli_epi32(x.v, S)};
}
static inline vf bits(vi x) { return {_mm512_castsi512_ps(x.v)}; }
static inline vi ibits(vf x) { return {_mm512_castps_si512(x.v)}; }
static inline vm lt(vf x, vf y) { return {_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ)}; }
static inline vm gt(vf x, vf y) { return {_mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ)}; }
static inline vf sel(vm m, vf x, vf y) { return {_mm512_mask_blend_ps(m.m, y.v, x.v)}; }
static inline uint32_t lanes(vm m) { return (uint32_t)m.m; }
static inline vm mask_of(uint32_t bits16) { return {(__mmask16)bits16}; }
// A written-out tree: the order of _mm512_reduce_add_ps is the compiler's choice.
static inline float hsum(vf x) {
  __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1)));
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  t = _mm_add_ss(t, _mm_shuffle_ps(t, t, 1));
  return _mm_cvtss_f32(t);
}
static inline float hmax(vf x) {
  __m256 s = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1)));
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  t = _mm_max_ss(t, _mm_shuffle_ps(t, t, 1));
  return _mm_cvtss_f32(t);
}
static inline vf ld_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline vf ld_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static inline vf ld_bf16_mixed(const uint16_t* p) { return ld_bf16(p); }
static inline vf reorder(vf x) { return x; }
static inline vf ld_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
static inline void st_i8(int8_t* p, vi x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x.v)); }
static inline int32_t sum_i8(const int8_t* p) {
  __m256i w = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_set1_epi16(1));
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1));
  return _mm_cvtsi128_si32(t);
}
static inline void mulhilo(vi x, uint32_t m, vi* hi, vi* lo) {
  __m512i mm = _mm512_set1_epi32((int)m);
  __m512i even = _mm512_mul_epu32(x.v, mm);
  __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x.v, 32), mm);
  lo->v = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  hi->v = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

template <int R, int BITS, int FOLD, int P0, int P1>
static inline void dot_group(const uint8_t* t, const int8_t* const* x, vi* out) {
  __m512i a[R];
  for (int r = 0; r < R; r++) a[r] = _mm512_setzero_si512();
  if (BITS == 4) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int c = P0 / 2; c < P1 / 2; c++) {
      __m512i w = _mm512_loadu_si512(t + c * 64);
      __m512i l = _mm512_and_si512(w, low);
      __m512i h = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        int32_t word;
        __builtin_memcpy(&word, x[r] + c * 8, 4);
        a[r] = _mm512_dpbusd_epi32(a[r], l, _mm512_set1_epi32(word));
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        int32_t word;
        __builtin_memcpy(&word, x[r] + c * 8 + 4, 4);
        a[r] = _mm512_dpbusd_epi32(a[r], h, _mm512_set1_epi32(word));
      }
    }
  } else {
#pragma GCC unroll 8
    for (int p = P0; p < P1; p++) {
      __m512i w = _mm512_loadu_si512(t + p * 64);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        int32_t word;
        __builtin_memcpy(&word, x[r] + p * 4, 4);
        a[r] = _mm512_dpbusd_epi32(a[r], w, _mm512_set1_epi32(word));
      }
    }
  }
  for (int r = 0; r < R; r++) out[r] = {a[r]};
}
#define TD_DOT8_CENTRED 0

template <int R>
static inline void step_bf16(const uint16_t* w, const float* const* x, const uint16_t* const* h, int64_t k, vf* acc) {
#if TD_HAS_BF16
  (void)x;
  __m512bh wv = (__m512bh)_mm512_loadu_si512(w);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    int32_t word;
    __builtin_memcpy(&word, h[r] + k, 4);
    acc[r].v = _mm512_dpbf16_ps(acc[r].v, wv, (__m512bh)_mm512_set1_epi32(word));
  }
#else
  (void)h;
  __m512i v = _mm512_loadu_si512(w);
  vf even = {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))};
  vf odd = {_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)))};
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) acc[r] = fma(set1(x[r][k]), even, acc[r]);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) acc[r] = fma(set1(x[r][k + 1]), odd, acc[r]);
#endif
}
#define TD_BF16_ACT TD_HAS_BF16

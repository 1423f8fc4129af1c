// Sixteen lanes as two AVX2 registers. Included inside an anonymous namespace.
#define TD_ROWS_Q 4
#define TD_ROWS_F 6
#define TD_ROWS_A 6

struct vf {
  __m256 a, b;
};
struct vi {
  __m256i a, b;
};
struct vm {
  __m256 a, b;
};

static inline vf ld(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void st(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline vf set1(float x) {
  __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
static inline vi set1i(int32_t x) {
  __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
static inline vi ldi(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
static inline vf add(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline vf sub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline vf mul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline vf div(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline vf vmax(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline vf vmin(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline vf fma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline vf vabs(vf x) {
  __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
static inline vf cvt(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline vi rnd(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline vi addi(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline vi subi(vi x, vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
static inline vi xori(vi x, vi y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
static inline vi andi(vi x, vi y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
template <int S>
static inline vi shl(vi x) {
  return {_mm256_slli_epi32(x.a, S), _mm256_slli_epi32(x.b, S)};
}
template <int S>
static inline vi shr(vi x) {
  return {_mm256_srli_epi32(x.a, S), _mm256_srli_epi32(x.b, S)};
}
static inline vf bits(vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline vi ibits(vf x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
static inline vm lt(vf x, vf y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
static inline vm gt(vf x, vf y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)}; }
// m ? x : y
static inline vf sel(vm m, vf x, vf y) { return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)}; }
static inline uint32_t lanes(vm m) { return (uint32_t)_mm256_movemask_ps(m.a) | ((uint32_t)_mm256_movemask_ps(m.b) << 8); }
static inline vm mask_of(uint32_t bits16) {
  __m256i sa = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i v = _mm256_set1_epi32((int)bits16);
  __m256i sb = _mm256_slli_epi32(sa, 8);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(v, sa), sa)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(v, sb), sb))};
}
static inline float hsum(vf x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  t = _mm_add_ss(t, _mm_shuffle_ps(t, t, 1));
  return _mm_cvtss_f32(t);
}
static inline float hmax(vf x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  t = _mm_max_ss(t, _mm_shuffle_ps(t, t, 1));
  return _mm_cvtss_f32(t);
}
static inline vf ld_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline vf ld_bf16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8))), 16))};
}
// The same, but in an order of lanes that is cheap to make; reorder() turns it into the natural one and back.
static inline vf ld_bf16_mixed(const uint16_t* p) {
  __m256i x = _mm256_loadu_si256((const __m256i*)p), zero = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, x)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, x))};
}
static inline vf reorder(vf x) {
  return {_mm256_permute2f128_ps(x.a, x.b, 0x20), _mm256_permute2f128_ps(x.a, x.b, 0x31)};
}
static inline vf ld_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
// Low bytes of sixteen int32 in [-128, 127].
static inline void st_i8(int8_t* p, vi x) {
  __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  __m128i c = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  _mm_storeu_si128((__m128i*)p, c);
}
static inline int32_t sum_i8(const int8_t* p) {  // 16 values
  __m256i w = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_set1_epi16(1));
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1));
  return _mm_cvtsi128_si32(t);
}
// Low and high 64-bit products' 32-bit words of sixteen lanes times one constant.
static inline void mulhilo(vi x, uint32_t m, vi* hi, vi* lo) {
  __m256i mm = _mm256_set1_epi32((int)m);
  __m256i* in[2] = {&x.a, &x.b};
  __m256i* oh[2] = {&hi->a, &hi->b};
  __m256i* ol[2] = {&lo->a, &lo->b};
  for (int i = 0; i < 2; i++) {
    __m256i even = _mm256_mul_epu32(*in[i], mm);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(*in[i], 32), mm);
    *ol[i] = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *oh[i] = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  }
}

// Pins a value to a register here: the compiler may otherwise turn a chain of integer additions into a tree whose leaves
// all spill.
#define TD_KEEP(x) __asm__("" : "+x"(x))

// Integer dot products of 16 outputs with R rows over inputs 4*P0 .. 4*P1 of a tile.
// FOLD: steps of 4 inputs whose int16 pair sums can't overflow (u4: 8 steps reach 30,480; |w| <= 32: 4 reach 32,512).
template <int R, int BITS, int FOLD, int P0, int P1>
static inline void dot_group(const uint8_t* t, const int8_t* const* x, vi* out) {
  const __m256i ones = _mm256_set1_epi16(1);
  if (BITS == 4) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i a[R], b[R];
    for (int r = 0; r < R; r++) a[r] = b[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int c = P0 / 2; c < P1 / 2; c++) {
      __m256i wa = _mm256_loadu_si256((const __m256i*)(t + c * 64));
      __m256i wb = _mm256_loadu_si256((const __m256i*)(t + c * 64 + 32));
      __m256i la = _mm256_and_si256(wa, low), lb = _mm256_and_si256(wb, low);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t word;
        __builtin_memcpy(&word, x[r] + c * 8, 4);
        __m256i v = _mm256_set1_epi32(word);
        a[r] = _mm256_add_epi16(a[r], _mm256_maddubs_epi16(la, v));
        b[r] = _mm256_add_epi16(b[r], _mm256_maddubs_epi16(lb, v));
        TD_KEEP(a[r]);
        TD_KEEP(b[r]);
      }
      la = _mm256_and_si256(_mm256_srli_epi16(wa, 4), low);
      lb = _mm256_and_si256(_mm256_srli_epi16(wb, 4), low);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t word;
        __builtin_memcpy(&word, x[r] + c * 8 + 4, 4);
        __m256i v = _mm256_set1_epi32(word);
        a[r] = _mm256_add_epi16(a[r], _mm256_maddubs_epi16(la, v));
        b[r] = _mm256_add_epi16(b[r], _mm256_maddubs_epi16(lb, v));
        TD_KEEP(a[r]);
        TD_KEEP(b[r]);
      }
    }
    for (int r = 0; r < R; r++) out[r] = {_mm256_madd_epi16(a[r], ones), _mm256_madd_epi16(b[r], ones)};
    return;
  }
  const __m256i flip = _mm256_set1_epi8((char)0x80);
  __m256i a[R], b[R], sa[R], sb[R];
  for (int r = 0; r < R; r++) a[r] = b[r] = sa[r] = sb[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int p = P0; p < P1; p++) {
    __m256i wa = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(t + p * 64)), flip);
    __m256i wb = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(t + p * 64 + 32)), flip);
    __m256i ma = _mm256_abs_epi8(wa), mb = _mm256_abs_epi8(wb);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t word;
      __builtin_memcpy(&word, x[r] + p * 4, 4);
      __m256i v = _mm256_set1_epi32(word);
      __m256i pa = _mm256_maddubs_epi16(ma, _mm256_sign_epi8(v, wa));
      __m256i pb = _mm256_maddubs_epi16(mb, _mm256_sign_epi8(v, wb));
      if (FOLD == 1) {
        a[r] = _mm256_add_epi32(a[r], _mm256_madd_epi16(pa, ones));
        b[r] = _mm256_add_epi32(b[r], _mm256_madd_epi16(pb, ones));
        TD_KEEP(a[r]);
        TD_KEEP(b[r]);
      } else {
        sa[r] = _mm256_add_epi16(sa[r], pa);
        sb[r] = _mm256_add_epi16(sb[r], pb);
        TD_KEEP(sa[r]);
        TD_KEEP(sb[r]);
        if ((p - P0) % FOLD == FOLD - 1) {
          a[r] = _mm256_add_epi32(a[r], _mm256_madd_epi16(sa[r], ones));
          b[r] = _mm256_add_epi32(b[r], _mm256_madd_epi16(sb[r], ones));
          sa[r] = sb[r] = _mm256_setzero_si256();
        }
      }
    }
  }
  for (int r = 0; r < R; r++) out[r] = {a[r], b[r]};
}
// dot_group's 8-bit results are of centred weights already.
#define TD_DOT8_CENTRED 1

// acc[r] += w[2 inputs][16 outputs] . x[r][2 inputs]
template <int R>
static inline void step_bf16(const uint16_t* w, const float* const* x, const uint16_t* const*, int64_t k, vf* acc) {
  const __m256i high = _mm256_set1_epi32((int)0xffff0000);
  __m256i wa = _mm256_loadu_si256((const __m256i*)w), wb = _mm256_loadu_si256((const __m256i*)(w + 16));
  vf even = {_mm256_castsi256_ps(_mm256_slli_epi32(wa, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(wb, 16))};
  vf odd = {_mm256_castsi256_ps(_mm256_and_si256(wa, high)), _mm256_castsi256_ps(_mm256_and_si256(wb, high))};
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) acc[r] = fma(set1(x[r][k]), even, acc[r]);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) acc[r] = fma(set1(x[r][k + 1]), odd, acc[r]);
}
#define TD_BF16_ACT 0

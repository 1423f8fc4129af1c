// Linear layers over weight tiles. Lane = output feature; a row's sums run over K in one fixed order whatever the
// number of rows, so R below changes speed and never a bit.

template <int KIND>
struct Format;
#define TD_FORMAT(kind, bits, off, fold, half, min, group)                            \
  template <>                                                                         \
  struct Format<kind> {                                                               \
    static const int BITS = bits, OFF = off, FOLD = fold, HALF = half, MIN = min;     \
    static const int GROUPS = 32 / group;                                             \
    static const int PAYLOAD = 64 * bits;                                             \
    static const int SCALE = 16 * (half ? 2 : 4);                                     \
    static const int BYTES = PAYLOAD + GROUPS * SCALE * (1 + min);                    \
  };
TD_FORMAT(TD_Q4_1, 4, 0, 8, 1, 1, 32)
TD_FORMAT(TD_Q4_0, 4, 8, 8, 1, 0, 32)
TD_FORMAT(TD_Q8_0, 8, 0, 1, 1, 0, 32)
TD_FORMAT(TD_Q5_0, 8, 0, 4, 1, 0, 32)
TD_FORMAT(TD_Q5_1, 8, 0, 4, 1, 1, 32)
TD_FORMAT(TD_Q4_K, 4, 0, 8, 0, 1, 32)
TD_FORMAT(TD_Q5_K, 8, 0, 4, 0, 1, 32)
TD_FORMAT(TD_Q6_K, 8, 0, 4, 0, 0, 16)
TD_FORMAT(TD_Q2_K, 4, 0, 8, 0, 1, 16)
TD_FORMAT(TD_Q3_K, 4, 8, 8, 0, 0, 16)
TD_FORMAT(TD_Q8_C, 8, 0, 1, 0, 0, 32)

template <class F>
static inline vf tile_scale(const uint8_t* p) {
  return F::HALF ? ld_f16((const uint16_t*)p) : ld((const float*)p);
}

template <class F, int R, int G>
static inline void tile_group(const uint8_t* t, const int8_t* const* xq, const TdXBlock* const* xb, int64_t b, vf* acc) {
  const int steps = 8 / F::GROUPS;
  vi dot[R];
  dot_group<R, F::BITS, F::FOLD, G * steps, G * steps + steps>(t, xq, dot);
  vf d = tile_scale<F>(t + F::PAYLOAD + G * F::SCALE);
  // What the stored unsigned value exceeds the meant one by.
  const int off = F::BITS == 8 ? (TD_DOT8_CENTRED ? 0 : 128) : F::OFF;
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const TdXBlock* x = xb[r] + b;
    if (off) {
      int32_t sum = F::GROUPS == 1 ? x->i0 + x->i1 : (G ? x->i1 : x->i0);
      dot[r] = subi(dot[r], set1i(off * sum));
    }
    acc[r] = fma(cvt(dot[r]), mul(d, set1(x->s)), acc[r]);
    if (F::MIN) {
      vf m = tile_scale<F>(t + F::PAYLOAD + (F::GROUPS + G) * F::SCALE);
      float fs = F::GROUPS == 1 ? x->fs : x->s * (float)(G ? x->i1 : x->i0);
      acc[r] = fma(m, set1(fs), acc[r]);
    }
  }
}

// How far ahead of its use a weight is fetched, and into which cache: the hardware's prefetcher stops at each page of
// 4 KiB.
#ifndef TD_AHEAD
#define TD_AHEAD 2048
#define TD_AHEAD_CACHE 3
#endif

template <class F, int R>
static inline void tile_rows(const uint8_t* t, int64_t blocks, const TdAct* x, int64_t m, vf* acc) {
  const int8_t* xq[R];
  const TdXBlock* xb[R];
  for (int r = 0; r < R; r++) {
    xq[r] = x->q + (m + r) * x->k;
    xb[r] = x->b + (m + r) * (x->k / 32);
    acc[r] = set1(0.0f);
  }
  for (int64_t b = 0; b < blocks; b++, t += F::BYTES) {
    for (int i = 0; i < F::BYTES; i += 64) __builtin_prefetch(t + TD_AHEAD + i, 0, TD_AHEAD_CACHE);
    tile_group<F, R, 0>(t, xq, xb, b, acc);
    if (F::GROUPS == 2) tile_group<F, R, 1>(t, xq, xb, b, acc);
    for (int r = 0; r < R; r++) xq[r] += 32;
  }
}

template <int R>
static inline void tile_rows_f32(const uint8_t* t, int64_t k, const TdAct* x, int64_t m, vf* acc) {
  const float* w = (const float*)t;
  const float* xf[R];
  for (int r = 0; r < R; r++) {
    xf[r] = x->f + (m + r) * x->k;
    acc[r] = set1(0.0f);
  }
  for (int64_t i = 0; i < k; i++, w += 16) {
    __builtin_prefetch((const char*)w + TD_AHEAD, 0, TD_AHEAD_CACHE);
    vf v = ld(w);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = fma(set1(xf[r][i]), v, acc[r]);
  }
}

template <int R>
static inline void tile_rows_bf16(const uint8_t* t, int64_t k, const TdAct* x, int64_t m, vf* acc) {
  const uint16_t* w = (const uint16_t*)t;
  const float* xf[R];
  const uint16_t* xh[R];
  for (int r = 0; r < R; r++) {
    xf[r] = x->f + (m + r) * x->k;
    xh[r] = x->h + (m + r) * x->k;
    acc[r] = set1(0.0f);
  }
  for (int64_t i = 0; i < k; i += 2, w += 32) {
    __builtin_prefetch((const char*)w + TD_AHEAD, 0, TD_AHEAD_CACHE);
    step_bf16<R>(w, xf, xh, i, acc);
  }
}

struct Store {
  float* out;
  int64_t ldo;
  const float* bias;
  int32_t add;
  float alpha;
  int64_t n;  // outputs of this tile, 1 to 16
};

template <int R>
static inline void store_rows(const Store* s, int64_t m, const vf* acc) {
  for (int r = 0; r < R; r++) {
    float* out = s->out + (m + r) * s->ldo;
    vf y = acc[r];
    if (s->n == 16) {
      if (s->bias) y = TD_NS::add(y, ld(s->bias));
      st(out, s->add ? fma(y, set1(s->alpha), ld(out)) : y);
      continue;
    }
    float full[16], bias[16] = {0}, old[16] = {0};
    for (int64_t i = 0; i < s->n; i++) {
      if (s->bias) bias[i] = s->bias[i];
      if (s->add) old[i] = out[i];
    }
    if (s->bias) y = TD_NS::add(y, ld(bias));
    st(full, s->add ? fma(y, set1(s->alpha), ld(old)) : y);
    for (int64_t i = 0; i < s->n; i++) out[i] = full[i];
  }
}

template <int KIND, int R>
static inline void run_rows(const uint8_t* t, int64_t k, const TdAct* x, int64_t m, const Store* s) {
  vf acc[R];
  if constexpr (KIND == TD_F32)
    tile_rows_f32<R>(t, k, x, m, acc);
  else if constexpr (KIND == TD_BF16)
    tile_rows_bf16<R>(t, k, x, m, acc);
  else
    tile_rows<Format<KIND>, R>(t, k / 32, x, m, acc);
  store_rows<R>(s, m, acc);
}

template <int KIND>
static int64_t column_bytes(int64_t k) {
  if constexpr (KIND == TD_F32)
    return k * 64;
  else if constexpr (KIND == TD_BF16)
    return k * 32;
  else
    return k / 32 * Format<KIND>::BYTES;
}

template <int KIND, int R>
static void rest_rows(int64_t n, const uint8_t* t, int64_t k, const TdAct* x, int64_t m, const Store* s) {
  if constexpr (R > 0) {
    if (n == R)
      run_rows<KIND, R>(t, k, x, m, s);
    else
      rest_rows<KIND, R - 1>(n, t, k, x, m, s);
  }
}

template <int KIND>
static void linear_kind(const TdWeight* w, int64_t t0, int64_t t1, const TdAct* x, int64_t m0, int64_t m1, float* out,
                        int64_t ldo, const float* bias, int32_t add, float alpha) {
  const int MR = KIND == TD_F32 || KIND == TD_BF16 ? TD_ROWS_F : TD_ROWS_Q;
  const int64_t bytes = column_bytes<KIND>(w->k);
  for (int64_t c = t0; c < t1; c++) {
    const uint8_t* t = w->data + c * bytes;
    int64_t n = w->n - c * 16;
    Store s = {out + c * 16, ldo, bias ? bias + c * 16 : nullptr, add, alpha, n < 16 ? n : 16};
    int64_t m = m0;
    for (; m + MR <= m1; m += MR) run_rows<KIND, MR>(t, w->k, x, m, &s);
    rest_rows<KIND, MR - 1>(m1 - m, t, w->k, x, m, &s);
  }
}

// out[m][n] (row stride ldo) = x . w + bias, or out += alpha * (x . w + bias), for tile columns t0..t1, rows m0..m1.
static void linear(const TdWeight* w, int64_t t0, int64_t t1, const TdAct* x, int64_t m0, int64_t m1, float* out,
                   int64_t ldo, const float* bias, int32_t add, float alpha) {
#define TD_CASE(K) \
  case K:          \
    return linear_kind<K>(w, t0, t1, x, m0, m1, out, ldo, bias, add, alpha);
  switch (w->kind) {
    TD_CASE(TD_F32)
    TD_CASE(TD_BF16)
    TD_CASE(TD_Q4_1)
    TD_CASE(TD_Q4_0)
    TD_CASE(TD_Q8_0)
    TD_CASE(TD_Q5_0)
    TD_CASE(TD_Q5_1)
    TD_CASE(TD_Q4_K)
    TD_CASE(TD_Q5_K)
    TD_CASE(TD_Q6_K)
    TD_CASE(TD_Q2_K)
    TD_CASE(TD_Q3_K)
    TD_CASE(TD_Q8_C)
  }
#undef TD_CASE
}

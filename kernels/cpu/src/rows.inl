// Work on single rows: quantisation, normalisation, rotary embedding, gated activations, KV writes. Lengths need not be
// multiples of 16: tails go through the same vector code on a padded copy.

static inline vf ld_part(const float* p, int64_t n) {
  float t[16] = {0};
  for (int64_t i = 0; i < n; i++) t[i] = p[i];
  return ld(t);
}
static inline void st_part(float* p, vf x, int64_t n) {
  float t[16];
  st(t, x);
  for (int64_t i = 0; i < n; i++) p[i] = t[i];
}
static inline vf ld_n(const float* p, int64_t n) { return n >= 16 ? ld(p) : ld_part(p, n); }
static inline void st_n(float* p, vf x, int64_t n) {
  if (n >= 16)
    st(p, x);
  else
    st_part(p, x, n);
}

// e^x to about 1 ulp on [-87, 88]; 0 below -87, saturated above 88. Cody-Waite reduction, minimax degree 6 (Cephes expf).
static inline vf vexp(vf x) {
  vm under = lt(x, set1(-87.0f));
  x = vmin(vmax(x, set1(-87.0f)), set1(88.0f));
  vi n = rnd(mul(x, set1(1.44269504088896341f)));
  vf f = cvt(n);
  vf r = fma(f, set1(-0.693359375f), x);
  r = fma(f, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return sel(under, set1(0.0f), mul(p, bits(shl<23>(addi(n, set1i(127))))));
}
// 2^x for x <= 0 to 1.6e-7; exactly 0 from -127 down. Coefficients: minimax of degree 5 on [-1/2, 1/2], 1 at 0.
static inline vf vexp2(vf x) {
  x = vmax(x, set1(-127.0f));
  vi n = rnd(x);
  vf f = sub(x, cvt(n));
  vf p = set1(1.326472731e-3f);
  p = fma(p, f, set1(9.671512991e-3f));
  p = fma(p, f, set1(5.550733581e-2f));
  p = fma(p, f, set1(2.402224243e-1f));
  p = fma(p, f, set1(6.931470037e-1f));
  p = fma(p, f, set1(1.0f));
  // At -127 f is 0 and the sum of exponents has all bits 0.
  return bits(addi(ibits(p), shl<23>(n)));
}
// 2^x for x <= 0 to 1.0e-4, a twentieth of what rounding to bf16 costs; exactly 0 from -127 down, 1 at 0. Minimax of
// degree 3 on [-1/2, 1/2]. Adding 1.5 * 2^23 rounds to an integer that then stands in the lowest bits.
static inline vf vexp2_rough(vf x) {
  x = vmax(x, set1(-127.0f));
  vf t = add(x, set1(12582912.0f));
  vf f = sub(x, sub(t, set1(12582912.0f)));
  vf p = set1(5.500893e-2f);
  p = fma(p, f, set1(2.4221096e-1f));
  p = fma(p, f, set1(6.9328293e-1f));
  p = fma(p, f, set1(1.0f));
  return bits(addi(ibits(p), shl<23>(ibits(t))));
}
static inline vf vtanh(vf x) {
  // 1 - 2 / (e^2x + 1)
  vf e = vexp(add(x, x));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

static inline uint16_t to_bf16(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 64);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// Brings one row into the forms that `need` names. k is a multiple of 32.
static void prepare(const float* x, int64_t k, int32_t need, const TdAct* act, int64_t row) {
  if (need & TD_NEED_F32) {
    float* f = act->f + row * act->k;
    if (f != x)
      for (int64_t i = 0; i < k; i += 16) st(f + i, ld(x + i));
  }
  if (need & TD_NEED_BF16) {
    uint16_t* h = act->h + row * act->k;
    for (int64_t i = 0; i < k; i++) h[i] = to_bf16(x[i]);
  }
  if (!(need & TD_NEED_I8)) return;
  int8_t* q = act->q + row * act->k;
  TdXBlock* b = act->b + row * (act->k / 32);
  for (int64_t i = 0; i < k; i += 32, q += 32, b++) {
    vf u = ld(x + i), v = ld(x + i + 16);
    float top = hmax(vmax(vabs(u), vabs(v)));
    float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    // A subnormal block overflows the reciprocal: it quantises to zero.
    if (!(inverse < 3.0e38f)) inverse = 0.0f;
    st_i8(q, rnd(mul(u, set1(inverse))));
    st_i8(q + 16, rnd(mul(v, set1(inverse))));
    b->s = inverse == 0.0f ? 0.0f : top / 127.0f;
    b->i0 = sum_i8(q);
    b->i1 = sum_i8(q + 16);
    b->fs = b->s * (float)(b->i0 + b->i1);
  }
}

static void rmsnorm(const float* x, const float* w, float eps, int64_t n, float* out) {
  vf s = set1(0.0f);
  for (int64_t i = 0; i < n; i += 16) {
    vf v = ld_n(x + i, n - i);
    s = fma(v, v, s);
  }
  float scale = 1.0f / __builtin_sqrtf(hsum(s) / (float)n + eps);
  for (int64_t i = 0; i < n; i += 16)
    st_n(out + i, mul(mul(ld_n(x + i, n - i), set1(scale)), ld_n(w + i, n - i)), n - i);
}

static void add_scaled(float* x, const float* y, float alpha, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) st_n(x + i, fma(ld_n(y + i, n - i), set1(alpha), ld_n(x + i, n - i)), n - i);
}

// Rotates pairs (i, i + half) of one head in place.
static void rope(float* x, const float* cos, const float* sin, int64_t rotary_dim) {
  int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    int64_t n = half - i;
    vf c = ld_n(cos + i, n), s = ld_n(sin + i, n), a = ld_n(x + i, n), b = ld_n(x + half + i, n);
    vf na = sub(mul(a, c), mul(b, s));
    vf nb = add(mul(b, c), mul(a, s));
    st_n(x + i, na, n);
    st_n(x + half + i, nb, n);
  }
}

// gate = act(gate) * up. 0: SiLU, 1: GELU (tanh form).
static void gated(float* gate, const float* up, int64_t n, int32_t activation) {
  for (int64_t i = 0; i < n; i += 16) {
    vf g = ld_n(gate + i, n - i), u = ld_n(up + i, n - i);
    if (activation == 0) {
      g = div(g, add(set1(1.0f), vexp(sub(set1(0.0f), g))));
    } else {
      vf t = mul(fma(mul(mul(g, g), g), set1(0.044715f), g), set1(0.7978845608028654f));
      g = mul(mul(g, set1(0.5f)), add(set1(1.0f), vtanh(t)));
    }
    st_n(gate + i, mul(g, u), n - i);
  }
}

static void softcap(float* x, int64_t n, float cap) {
  for (int64_t i = 0; i < n; i += 16)
    st_n(x + i, mul(set1(cap), vtanh(div(ld_n(x + i, n - i), set1(cap)))), n - i);
}

// Writes one token's K and V of one head into its group of 16 slots; slot in 0..15. Layouts: attention_products.inl.
// bf16: neighbouring slots share words of V, and another thread may write the other half.
static void kv_write(const float* k, const float* v, int32_t type, int64_t head_dim, void* k_group, void* v_group,
                     int64_t slot, float* k_scale, float* v_scale) {
  if (type == TD_KV_F32) {
    for (int64_t d = 0; d < head_dim; d++) ((float*)k_group)[d * 16 + slot] = k[d];
    for (int64_t d = 0; d < head_dim; d++) ((float*)v_group)[slot * head_dim + d] = v[d];
    return;
  }
  if (type == TD_KV_BF16) {
    uint16_t narrow[512];
    for (int64_t d = 0; d < head_dim; d++) narrow[d] = to_bf16(k[d]);
    for (int64_t d = 0; d < head_dim; d += 2) __builtin_memcpy((uint16_t*)k_group + d * 16 + slot * 2, narrow + d, 4);
    for (int64_t d = 0; d < head_dim; d++) narrow[d] = to_bf16(v[d]);
    uint16_t* out = (uint16_t*)v_group + slot / 2 * 2 * head_dim + slot % 2;
    for (int64_t d = 0; d < head_dim; d++) out[d * 2] = narrow[d];
    return;
  }
  vf mk = set1(0.0f), mv = set1(0.0f);
  for (int64_t d = 0; d < head_dim; d += 16) {
    mk = vmax(mk, vabs(ld_n(k + d, head_dim - d)));
    mv = vmax(mv, vabs(ld_n(v + d, head_dim - d)));
  }
  float tk = hmax(mk), tv = hmax(mv);
  float rk = tk > 1e-30f ? 127.0f / tk : 0.0f, rv = tv > 1e-30f ? 127.0f / tv : 0.0f;
  *k_scale = tk / 127.0f;
  *v_scale = tv / 127.0f;
  int8_t buf[16];
  for (int64_t d = 0; d < head_dim; d += 16) {
    int64_t n = head_dim - d < 16 ? head_dim - d : 16;
    st_i8(buf, rnd(mul(ld_n(k + d, n), set1(rk))));
    for (int64_t i = 0; i < n; i++) ((int8_t*)k_group)[(d + i) * 16 + slot] = buf[i];
    st_i8(buf, rnd(mul(ld_n(v + d, n), set1(rv))));
    for (int64_t i = 0; i < n; i++) ((int8_t*)v_group)[slot * head_dim + d + i] = buf[i];
  }
}

// Sixteen lanes as plain arrays: for any CPU. fma() here multiplies and adds with two roundings, because the fused
// library call is slow where the hardware has none. Included inside an anonymous namespace.
#define TD_ROWS_Q 2
#define TD_ROWS_F 2
#define TD_ROWS_A 2
#define TD_EACH for (int i = 0; i < 16; i++)

struct vf {
  float v[16];
};
struct vi {
  int32_t v[16];
};
struct vm {
  int32_t v[16];
};

static inline vf ld(const float* p) {
  vf o;
  TD_EACH o.v[i] = p[i];
  return o;
}
static inline void st(float* p, vf x) { TD_EACH p[i] = x.v[i]; }
static inline vf set1(float x) {
  vf o;
  TD_EACH o.v[i] = x;
  return o;
}
static inline vi set1i(int32_t x) {
  vi o;
  TD_EACH o.v[i] = x;
  return o;
}
static inline vi ldi(const int32_t* p) {
  vi o;
  TD_EACH o.v[i] = p[i];
  return o;
}
#define TD_BIN(T, name, expr)          \
  static inline T name(T x, T y) {     \
    T o;                               \
    TD_EACH o.v[i] = expr;             \
    return o;                          \
  }
TD_BIN(vf, add, x.v[i] + y.v[i])
TD_BIN(vf, sub, x.v[i] - y.v[i])
TD_BIN(vf, mul, x.v[i] * y.v[i])
TD_BIN(vf, div, x.v[i] / y.v[i])
TD_BIN(vf, vmax, x.v[i] > y.v[i] ? x.v[i] : y.v[i])
TD_BIN(vf, vmin, x.v[i] < y.v[i] ? x.v[i] : y.v[i])
TD_BIN(vi, addi, (int32_t)((uint32_t)x.v[i] + (uint32_t)y.v[i]))
TD_BIN(vi, subi, (int32_t)((uint32_t)x.v[i] - (uint32_t)y.v[i]))
TD_BIN(vi, xori, x.v[i] ^ y.v[i])
TD_BIN(vi, andi, x.v[i] & y.v[i])
static inline vf fma(vf x, vf y, vf z) { return add(mul(x, y), z); }
static inline vf bits(vi x) {
  vf o;
  __builtin_memcpy(&o, &x, sizeof(o));
  return o;
}
static inline vi ibits(vf x) {
  vi o;
  __builtin_memcpy(&o, &x, sizeof(o));
  return o;
}
static inline vf vabs(vf x) { return bits(andi(ibits(x), set1i(0x7fffffff))); }
static inline vf cvt(vi x) {
  vf o;
  TD_EACH o.v[i] = (float)x.v[i];
  return o;
}
static inline vi rnd(vf x) {
  // Adding and taking away 1.5 * 2^23 rounds to the nearest even integer; callers stay within +-2^22.
  vi o;
  TD_EACH {
    float t = x.v[i] + 12582912.0f;
    o.v[i] = (int32_t)(t - 12582912.0f);
  }
  return o;
}
template <int S>
static inline vi shl(vi x) {
  TD_EACH x.v[i] = (int32_t)((uint32_t)x.v[i] << S);
  return x;
}
template <int S>
static inline vi shr(vi x) {
  TD_EACH x.v[i] = (int32_t)((uint32_t)x.v[i] >> S);
  return x;
}
static inline vm lt(vf x, vf y) {
  vm o;
  TD_EACH o.v[i] = x.v[i] < y.v[i];
  return o;
}
static inline vm gt(vf x, vf y) {
  vm o;
  TD_EACH o.v[i] = x.v[i] > y.v[i];
  return o;
}
static inline vf sel(vm m, vf x, vf y) {
  TD_EACH x.v[i] = m.v[i] ? x.v[i] : y.v[i];
  return x;
}
static inline uint32_t lanes(vm m) {
  uint32_t o = 0;
  TD_EACH o |= (uint32_t)(m.v[i] != 0) << i;
  return o;
}
static inline vm mask_of(uint32_t bits16) {
  vm o;
  TD_EACH o.v[i] = (bits16 >> i) & 1;
  return o;
}
static inline float hsum(vf x) {
  for (int w = 8; w; w >>= 1)
    for (int i = 0; i < w; i++) x.v[i] += x.v[i + w];
  return x.v[0];
}
static inline float hmax(vf x) {
  for (int w = 8; w; w >>= 1)
    for (int i = 0; i < w; i++) x.v[i] = x.v[i] > x.v[i + w] ? x.v[i] : x.v[i + w];
  return x.v[0];
}
static inline float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023, u;
  if (e == 0) {
    float f = (float)m * 5.9604644775390625e-08f;
    __builtin_memcpy(&u, &f, 4);
    u |= sign;
  } else if (e == 31) {
    u = sign | 0x7f800000u | (m << 13);
  } else {
    u = sign | ((e + 112) << 23) | (m << 13);
  }
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
static inline vf ld_f16(const uint16_t* p) {
  vf o;
  TD_EACH o.v[i] = half_to_float(p[i]);
  return o;
}
static inline vf ld_bf16(const uint16_t* p) {
  vi o;
  TD_EACH o.v[i] = (int32_t)((uint32_t)p[i] << 16);
  return bits(o);
}
static inline vf ld_bf16_mixed(const uint16_t* p) { return ld_bf16(p); }
static inline vf reorder(vf x) { return x; }
static inline vf ld_i8(const int8_t* p) {
  vf o;
  TD_EACH o.v[i] = (float)p[i];
  return o;
}
static inline void st_i8(int8_t* p, vi x) { TD_EACH p[i] = (int8_t)x.v[i]; }
static inline int32_t sum_i8(const int8_t* p) {
  int32_t s = 0;
  TD_EACH s += p[i];
  return s;
}
static inline void mulhilo(vi x, uint32_t m, vi* hi, vi* lo) {
  TD_EACH {
    uint64_t v = (uint64_t)(uint32_t)x.v[i] * m;
    lo->v[i] = (int32_t)(uint32_t)v;
    hi->v[i] = (int32_t)(uint32_t)(v >> 32);
  }
}

template <int R, int BITS, int FOLD, int P0, int P1>
static inline void dot_group(const uint8_t* t, const int8_t* const* x, vi* out) {
  for (int r = 0; r < R; r++) out[r] = set1i(0);
  for (int p = P0; p < P1; p++) {
    int8_t w[64];
    if (BITS == 4) {
      const uint8_t* s = t + (p / 2) * 64;
      for (int i = 0; i < 64; i++) w[i] = (int8_t)((p & 1) ? s[i] >> 4 : s[i] & 15);
    } else {
      for (int i = 0; i < 64; i++) w[i] = (int8_t)(t[p * 64 + i] ^ 0x80);
    }
    for (int r = 0; r < R; r++) {
      const int8_t* v = x[r] + p * 4;
      TD_EACH out[r].v[i] += w[4 * i] * v[0] + w[4 * i + 1] * v[1] + w[4 * i + 2] * v[2] + w[4 * i + 3] * v[3];
    }
  }
}
#define TD_DOT8_CENTRED 1

template <int R>
static inline void step_bf16(const uint16_t* w, const float* const* x, const uint16_t* const*, int64_t k, vf* acc) {
  vi even, odd;
  TD_EACH {
    even.v[i] = (int32_t)((uint32_t)w[2 * i] << 16);
    odd.v[i] = (int32_t)((uint32_t)w[2 * i + 1] << 16);
  }
  for (int r = 0; r < R; r++) acc[r] = fma(set1(x[r][k]), bits(even), acc[r]);
  for (int r = 0; r < R; r++) acc[r] = fma(set1(x[r][k + 1]), bits(odd), acc[r]);
}
#define TD_BF16_ACT 0

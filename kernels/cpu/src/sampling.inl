// Reductions over logits, and Gumbel noise from Philox4x32-10. Ties go to the lowest id.

// Index of the greatest value; -1 if all are -inf, -2 if one is NaN or +inf.
static int64_t argmax(const float* x, int64_t n) {
  const vf infinite = set1(__builtin_inff());
  vf best = set1(-__builtin_inff());
  uint32_t sane = 0xffff;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    vf v = ld(x + i);
    sane &= lanes(lt(v, infinite));
    best = vmax(v, best);
  }
  float top = hmax(best);
  for (; i < n; i++) {
    if (!(x[i] < __builtin_inff())) sane = 0;
    if (x[i] > top) top = x[i];
  }
  if (sane != 0xffff) return -2;
  if (top == -__builtin_inff()) return -1;
  for (i = 0; i + 16 <= n; i += 16)
    if (uint32_t hit = lanes(lt(ld(x + i), set1(top))) ^ 0xffff) return i + __builtin_ctz(hit);
  for (; i < n; i++)
    if (x[i] == top) return i;
  return -2;
}

// Takes the logits of one column of tiles (n of them, 1 to 16) into a running argmax per lane: state[0 .. 15] are values,
// state[16 .. 31] columns. The outcome does not depend on the order of columns; NaN counts as +inf.
static void peak(const float* x, int64_t n, int64_t column, float* state) {
  const vf infinite = set1(__builtin_inff()), here = set1((float)column);
  vf v;
  if (n >= 16) {
    v = ld(x);
  } else {
    float t[16];
    for (int64_t l = 0; l < 16; l++) t[l] = l < n ? x[l] : -__builtin_inff();
    v = ld(t);
  }
  v = sel(lt(v, infinite), v, infinite);
  vf best = ld(state), where = ld(state + 16);
  uint32_t more = lanes(gt(v, best)), less = lanes(lt(v, best));
  vm take = mask_of(more | (~less & lanes(lt(here, where)) & 0xffff));
  st(state, sel(take, v, best));
  st(state + 16, sel(take, here, where));
}

static void divide(const float* x, int64_t n, float by, float* out) {
  for (int64_t i = 0; i < n; i += 16) st_n(out + i, div(ld_n(x + i, n - i), set1(by)), n - i);
}

// Sum of exp(x - top) over x >= floor. fp32 within 512 values, fp64 over them: the error of 10^5 addends stays < 1e-7.
static double expsum(const float* x, int64_t n, float top, float floor) {
  const vf minus = set1(-__builtin_inff());
  double total = 0.0;
  for (int64_t i = 0; i < n; i += 512) {
    vf s = set1(0.0f);
    int64_t end = i + 512 < n ? i + 512 : n, j = i;
    for (; j + 16 <= end; j += 16) {
      vf v = ld(x + j);
      s = add(s, vexp(sub(sel(lt(v, set1(floor)), minus, v), set1(top))));
    }
    if (j < end) {
      float t[16];
      for (int64_t l = 0; l < 16; l++) t[l] = j + l < end && !(x[j + l] < floor) ? x[j + l] : -__builtin_inff();
      s = add(s, vexp(sub(ld(t), set1(top))));
    }
    total += (double)hsum(s);
  }
  return total;
}

// Indices of values >= least, ascending; at most room of them. Returns how many there are in all.
static int64_t find_from(const float* x, int64_t n, float least, int32_t* out, int64_t room) {
  int64_t count = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    uint32_t hit = lanes(lt(ld(x + i), set1(least))) ^ 0xffff;
    while (hit) {
      if (count < room) out[count] = (int32_t)(i + __builtin_ctz(hit));
      count++;
      hit &= hit - 1;
    }
  }
  for (; i < n; i++)
    if (!(x[i] < least)) {
      if (count < room) out[count] = (int32_t)i;
      count++;
    }
  return count;
}

static int64_t count_greater(const float* x, int64_t n, float than) {
  int64_t count = 0, i = 0;
  for (; i + 16 <= n; i += 16) count += __builtin_popcount(lanes(gt(ld(x + i), set1(than))));
  for (; i < n; i++) count += x[i] > than;
  return count;
}

// First word of Philox4x32-10 (Salmon et al., SC 2011) for 16 token ids.
static inline vi philox_word(vi ids, const TdSample* p) {
  vi c0 = set1i(p->position), c1 = ids, c2 = set1i(p->choice), c3 = set1i(p->purpose);
  uint32_t k0 = (uint32_t)p->seed, k1 = (uint32_t)(p->seed >> 32);
#pragma GCC unroll 10
  for (int i = 0; i < 10; i++) {
    vi h0, l0, h1, l1;
    mulhilo(c0, 0xD2511F53u, &h0, &l0);
    mulhilo(c2, 0xCD9E8D57u, &h1, &l1);
    c0 = xori(xori(h1, c1), set1i((int32_t)k0));
    c2 = xori(xori(h0, c3), set1i((int32_t)k1));
    c1 = l1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// ln(x) for normal positive x, about 1 ulp: mantissa to [sqrt(1/2), sqrt(2)), then a degree-8 minimax (Cephes logf).
static inline vf vlog(vf x) {
  vi i = ibits(x);
  vf e = cvt(subi(shr<23>(i), set1i(126)));
  vf m = bits(xori(andi(i, set1i(0x007fffff)), set1i(0x3f000000)));
  vm small = lt(m, set1(0.707106781186547524f));
  e = sub(e, sel(small, set1(1.0f), set1(0.0f)));
  m = sub(add(m, sel(small, m, set1(0.0f))), set1(1.0f));
  vf z = mul(m, m);
  vf p = set1(7.0376836292e-2f);
  p = fma(p, m, set1(-1.1514610310e-1f));
  p = fma(p, m, set1(1.1676998740e-1f));
  p = fma(p, m, set1(-1.2420140846e-1f));
  p = fma(p, m, set1(1.4249322787e-1f));
  p = fma(p, m, set1(-1.6668057665e-1f));
  p = fma(p, m, set1(2.0000714765e-1f));
  p = fma(p, m, set1(-2.4999993993e-1f));
  p = fma(p, m, set1(3.3333331174e-1f));
  p = mul(mul(p, m), z);
  p = fma(e, set1(-2.12194440e-4f), p);
  p = fma(z, set1(-0.5f), p);
  return fma(e, set1(0.693359375f), add(m, p));
}

// Gumbel noise -ln(-ln(u)), u = (word >> 9 + 1/2) / 2^23.
static inline vf gumbel(vi ids, const TdSample* p) {
  vf u = mul(add(cvt(shr<9>(philox_word(ids, p))), set1(0.5f)), set1(1.1920928955078125e-7f));
  return sub(set1(0.0f), vlog(sub(set1(0.0f), vlog(u))));
}

// The reference value of the noise: logarithms in fp64, rounded once.
static inline float gumbel_exact(int32_t id, const TdSample* p) {
  static const int32_t step[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int32_t words[16];
  vi w = philox_word(addi(ldi(step), set1i(id)), p);
  __builtin_memcpy(words, &w, sizeof(words));
  float u = ((float)((uint32_t)words[0] >> 9) + 0.5f) * 1.1920928955078125e-7f;
  return (float)-__builtin_log(-__builtin_log((double)u));
}

// Keeps the greater value + noise; of equal ones the lower place.
static inline void consider(int64_t place, int32_t id, float value, const TdSample* p, float* best, int64_t* where) {
  float y = value + gumbel_exact(id, p);
  if (*where < 0 || y > *best || (y == *best && place < *where)) {
    *best = y;
    *where = place;
  }
}

// Argmax of x / by + noise, as a place in x; ties to the lowest id. names[place]: the ids that key the noise, ascending;
// null: the places themselves. Exact: `first`, the greatest value's place, gives a bound; noise is at most 16.64, so most
// of a vocabulary can't win and is never looked at; of the rest fp32 noise (error < 1e-4) leaves a few for fp64.
// floor: the least x / by that takes part. room: n numbers.
static int64_t argmax_noise(const float* x, int64_t n, int64_t first, float by, float floor, const int32_t* names,
                            int32_t* room, const TdSample* p) {
  const float top = x[first] / by, slack = 1e-3f + 1e-5f * __builtin_fabsf(top);
  float best = 0.0f;
  int64_t where = -1;
  consider(first, names ? names[first] : (int32_t)first, top, p, &best, &where);
  float least = best - 16.65f - slack;
  if (floor > least) least = floor;
  // Before the division, with room for its rounding.
  const float raw = least * by - 1e-6f * __builtin_fabsf(least * by) - 1e-30f;
  const int64_t count = find_from(x, n, raw, room, n);
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t have = count - i < 16 ? count - i : 16;
    float t[16];
    int32_t ids[16];
    for (int64_t l = 0; l < 16; l++) {
      const int32_t place = l < have ? room[i + l] : (int32_t)first;
      t[l] = x[place];
      ids[l] = names ? names[place] : place;
    }
    vf v = div(ld(t), set1(by)), y = add(v, gumbel(ldi(ids), p));
    uint32_t open = ~(lanes(lt(y, set1(best - slack))) | lanes(lt(v, set1(floor)))) & (uint32_t)((1 << have) - 1);
    float values[16];
    st(values, v);
    while (open) {
      const int l = __builtin_ctz(open);
      open &= open - 1;
      if (values[l] > -__builtin_inff()) consider(room[i + l], ids[l], values[l], p, &best, &where);
    }
  }
  return where;
}

// The same over a list of places in values that were divided already.
static int64_t argmax_noise_of(const float* x, const int32_t* places, int64_t count, const int32_t* names,
                               const TdSample* p) {
  float best = 0.0f;
  int64_t where = -1;
  for (int64_t i = 0; i < count; i++)
    consider(places[i], names ? names[places[i]] : places[i], x[places[i]], p, &best, &where);
  return where;
}

static void noise(const TdSample* p, int64_t n, float* fast, float* exact) {
  static const int32_t step[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t i = 0; i < n; i += 16) st_n(fast + i, gumbel(addi(ldi(step), set1i((int32_t)i)), p), n - i);
  for (int64_t i = 0; i < n; i++) exact[i] = gumbel_exact((int32_t)i, p);
}

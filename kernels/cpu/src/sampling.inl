// Reductions over logits, and Gumbel noise from Philox4x32-10. Ties go to the lowest id.

static int64_t argmax(const float* x, int64_t n) {
  vf best = set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) best = vmax(ld(x + i), best);
  float top = hmax(best);
  for (; i < n; i++)
    if (x[i] > top) top = x[i];
  for (i = 0; i < n; i++)
    if (x[i] == top) return i;
  return -1;
}

// log(sum(exp(x))) in fp32 over fixed lanes; -inf entries count nothing.
static float logsumexp(const float* x, int64_t n) {
  vf best = set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) best = vmax(ld(x + i), best);
  float top = hmax(best);
  for (; i < n; i++)
    if (x[i] > top) top = x[i];
  if (top == -__builtin_inff()) return top;
  // Double-width sums per chunk keep the error of 10^5 addends under 1e-7.
  double total = 0.0;
  for (i = 0; i < n; i += 512) {
    vf s = set1(0.0f);
    int64_t end = i + 512 < n ? i + 512 : n, j = i;
    for (; j + 16 <= end; j += 16) s = add(s, vexp(sub(ld(x + j), set1(top))));
    if (j < end) {
      float t[16];
      for (int64_t l = 0; l < 16; l++) t[l] = j + l < end ? x[j + l] : -__builtin_inff();
      s = add(s, vexp(sub(ld(t), set1(top))));
    }
    total += (double)hsum(s);
  }
  return (float)((double)top + __builtin_log(total));
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

// Argmax of x * scale + noise over all ids. A block whose best logit can't win with the largest possible noise
// (16.7 for these uniforms) is skipped: exact, and most of a vocabulary is.
static int64_t argmax_noise(const float* x, int64_t n, float scale, const TdSample* p) {
  static const int32_t step[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float best = -__builtin_inff();
  int64_t where = -1;
  int64_t start = argmax(x, n);
  if (start < 0) return -1;
  // Begin with the likeliest block, so that the bound is high from the start.
  for (int pass = 0; pass < 2; pass++) {
    int64_t lo = pass ? 0 : start / 16 * 16, hi = pass ? n : lo + 16;
    for (int64_t i = lo; i < hi && i < n; i += 16) {
      if (pass && i == start / 16 * 16) continue;
      vf v;
      if (i + 16 <= n) {
        v = mul(ld(x + i), set1(scale));
      } else {
        float t[16];
        for (int64_t l = 0; l < 16; l++) t[l] = i + l < n ? x[i + l] : -__builtin_inff();
        v = mul(ld(t), set1(scale));
      }
      if (!lanes(gt(add(v, set1(16.8f)), set1(best))) && where >= 0) continue;
      float y[16], g[16];
      st(g, v);
      st(y, add(v, gumbel(addi(ldi(step), set1i((int32_t)i)), p)));
      for (int64_t l = 0; l < 16 && i + l < n; l++) {
        if (g[l] == -__builtin_inff() || !(y[l] >= best)) continue;
        if (y[l] > best || where < 0 || i + l < where) {
          best = y[l];
          where = i + l;
        }
      }
    }
  }
  return where;
}

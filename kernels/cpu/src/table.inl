static const TdKernels kTable = {
    TD_NAME,  TD_BF16_ACT, linear,    prepare, rmsnorm, add_scaled, rope,      gated,         softcap,      kv_write,
    attention, merge,      argmax,    peak,    divide,  expsum,  find_from,  count_greater, argmax_noise, argmax_noise_of,
    noise,
};

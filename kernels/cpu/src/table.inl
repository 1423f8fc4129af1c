static const TdKernels kTable = {
    TD_NAME, TD_BF16_ACT, linear,    prepare, rmsnorm, add_scaled,   rope,      gated,
    softcap, kv_write,    attention, merge,   argmax,  argmax_noise, logsumexp, count_greater,
};

"""A small network of each of timm's families."""

from __future__ import annotations

# With stochastic depth; those of the first line have a rate of their own in timm.
WITH_PATHS = [
    "focalnet_tiny_srf", "nest_tiny", "pit_ti_224", "rexnet_100", "hgnetv2_b0",
    "test_byobnet", "test_coatnet", "test_convnext", "test_efficientnet", "test_mambaout", "test_nfnet", "test_resnet",
    "test_vit", "test_vit_relpos", "cpubone_nano", "cs3darknet_focus_s", "cspnext_tiny", "edgenext_xx_small",
    "efficientformerv2_s0", "fasternet_t0", "fastvit_t8", "gcvit_xxtiny", "hardcorenas_b", "lcnet_035", "levit_128s",
    "mobilevit_xxs", "pvt_v2_b0", "regnetx_002", "resnest14d", "resnetv2_18", "starnet_s050", "ese_vovnet19b_slim_dw",
]  # fmt: skip
WITHOUT_PATHS = [
    "bninception", "googlenet", "densenet121", "dla46x_c", "dpn48b", "efficientvit_b0", "efficientvit_m0",
    "ghostnet_050", "repghostnet_050", "legacy_seresnet18", "lcnetv2_small", "shvit_s1",
]  # fmt: skip
# More than a second each.
LARGER = [
    "cait_xxs24_224", "coat_tiny", "convit_tiny", "csatv2", "davit_tiny", "deit_tiny_patch16_224", "gmlp_ti16_224",
    "hiera_tiny_224", "iformer_t", "inception_next_atto", "mvitv2_tiny", "nextvit_small", "poolformerv2_s12",
    "rdnet_tiny", "res2next50", "sam2_hiera_tiny", "sequencer2d_s", "skresnet18", "swiftformer_xs",
    "swin_tiny_patch4_window7_224",
    "swinv2_cr_tiny_224", "swinv2_tiny_window8_256", "tiny_vit_5m_224", "tnt_s_legacy_patch16_224", "tresnet_m",
    "twins_svt_small", "visformer_tiny", "vit_small_patch16_224", "vit_tiny_patch16_dinov3_qkvb",
    "vit_tiny_r_s16_p8_224", "vitamin_small_224", "volo_d1_224", "xception41p", "xcit_nano_12_p8_224",
]  # fmt: skip

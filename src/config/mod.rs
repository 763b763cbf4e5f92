//! `KubeletConfiguration` v1beta1: fields, defaults, validation, flags, drop-ins, feature gates, configz.

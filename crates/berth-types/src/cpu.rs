//! Conversion between milli-CPU and the kernel's CPU shares, quota, and weight. Pure.
//! Implements spec 06a §4.
//!
//! The single place of the conversion: pod cgroups, requests to the runtime, and the runtime's reports have to agree
//! exactly.

/// Minimum CPU shares, also those of a container without a request.
pub const MIN_SHARES: u64 = 2;
/// Maximum CPU shares.
pub const MAX_SHARES: u64 = 262_144;
/// Minimum quota that the kernel accepts, microseconds.
pub const MIN_QUOTA_US: i64 = 1000;
/// Default quota period, microseconds.
pub const DEFAULT_PERIOD_US: u64 = 100_000;

/// CPU shares of a request; 2 for a request of zero or less.
pub fn shares(milli: i64) -> u64 {
    let milli = u128::from(milli.max(0).unsigned_abs());
    u64::try_from(milli * 1024 / 1000).unwrap_or(MAX_SHARES).clamp(MIN_SHARES, MAX_SHARES)
}

/// Quota in microseconds per period of a limit; 0 for no limit, otherwise at least 1000.
pub fn quota(milli: i64, period_us: u64) -> i64 {
    if milli <= 0 {
        return 0;
    }
    let quota = i128::from(milli) * i128::from(period_us) / 1000;
    i64::try_from(quota).unwrap_or(i64::MAX).max(MIN_QUOTA_US)
}

/// Request in milli-CPU that corresponds to CPU shares, rounded up; 0 below the minimum shares.
pub fn milli_of_shares(shares: u64) -> i64 {
    if shares < MIN_SHARES {
        return 0;
    }
    i64::try_from((u128::from(shares) * 1000).div_ceil(1024)).unwrap_or(i64::MAX)
}

/// `cpu.weight` of the agent's own cgroups (kubepods, QoS, pod): linear in the shares.
pub fn linear_weight(shares: u64) -> u64 {
    if shares >= MAX_SHARES {
        return 10_000;
    }
    1 + (shares.max(MIN_SHARES) - MIN_SHARES) * 9999 / 262_142
}

/// CPU shares that correspond to a `cpu.weight` of the agent's own cgroups.
pub fn shares_of_weight(weight: u64) -> u64 {
    2 + (weight.clamp(1, 10_000) - 1) * 262_142 / 9999
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shares_and_weights_equal_the_table_of_the_specification() {
        for (milli, expected, linear) in [
            (-1, 2, 1),
            (0, 2, 1),
            (5, 5, 1),
            (10, 10, 1),
            (100, 102, 4),
            (250, 256, 10),
            // AC-06a-11
            (350, 358, 14),
            (500, 512, 20),
            // AC-06a-2
            (1000, 1024, 39),
            (2000, 2048, 79),
            (4000, 4096, 157),
            (8000, 8192, 313),
            (16_000, 16_384, 625),
            (64_000, 65_536, 2500),
            (i64::MAX, 262_144, 10_000),
        ] {
            assert_eq!((shares(milli), linear_weight(shares(milli))), (expected, linear), "{milli}");
        }
        for (weight, expected) in [(1, 2), (2, 28), (4, 80), (245, 6398), (10_000, 262_144), (0, 2)] {
            assert_eq!(shares_of_weight(weight), expected, "{weight}");
        }
    }

    #[test]
    fn quotas_equal_the_table_of_the_specification() {
        for (milli, period, expected) in [
            (0, 100_000, 0),
            (-5, 100_000, 0),
            // AC-06a-6
            (5, 100_000, 1000),
            (10, 100_000, 1000),
            (417, 100_000, 41_700),
            // AC-03a-14
            (2000, 100_000, 200_000),
            (1000, 10_000, 10_000),
            (i64::MAX, u64::MAX, i64::MAX),
        ] {
            assert_eq!(quota(milli, period), expected, "{milli} {period}");
        }
        for (shares, milli) in [(0, 0), (1, 0), (2, 2), (102, 100), (1024, 1000), (u64::MAX, i64::MAX)] {
            assert_eq!(milli_of_shares(shares), milli, "{shares}");
        }
    }

    proptest! {
        #[test]
        fn more_cpu_never_weighs_less(a in 0_i64..500_000, more in 0_i64..500_000) {
            prop_assert!(shares(a) <= shares(a + more));
            prop_assert!(linear_weight(shares(a)) <= linear_weight(shares(a + more)));
            prop_assert!(quota(a, 100_000) <= quota(a + more, 100_000));
        }

        #[test]
        fn every_value_is_one_the_kernel_takes(milli: i64, period in 1000_u64..=1_000_000, any: u64) {
            prop_assert!((MIN_SHARES..=MAX_SHARES).contains(&shares(milli)));
            prop_assert!((1..=10_000).contains(&linear_weight(any)));
            prop_assert!((MIN_SHARES..=MAX_SHARES).contains(&shares_of_weight(any)));
            let quota = quota(milli, period);
            prop_assert!(quota == 0 || quota >= MIN_QUOTA_US);
        }

        #[test]
        fn a_request_survives_the_way_through_shares(milli in 2_i64..256_000) {
            let back = milli_of_shares(shares(milli));
            prop_assert!((milli - 1..=milli).contains(&back), "{milli} {back}");
        }
    }
}

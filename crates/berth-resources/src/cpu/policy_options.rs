//! CPU manager policies `none` and `static`, and the options of the static policy. Pure. Spec 06b §1.2.

use std::collections::BTreeMap;

use berth_types::{CpuSet, fieldpath::quoted, go_bool};

use super::{
    distributed_allocator::take_distributed,
    packed_allocator::{AllocatorOptions, NotEnoughCpus, take_packed},
};
use crate::{pod_level::PodLevelManagement, topology::CpuTopology};

const FULL_PCPUS_ONLY: &str = "full-pcpus-only";
const STRICT_CPU_RESERVATION: &str = "strict-cpu-reservation";
const PREFER_ALIGN_BY_UNCORE_CACHE: &str = "prefer-align-cpus-by-uncorecache";
const DISTRIBUTE_ACROSS_NUMA: &str = "distribute-cpus-across-numa";
const ALIGN_BY_SOCKET: &str = "align-by-socket";
const DISTRIBUTE_ACROSS_CORES: &str = "distribute-cpus-across-cores";

/// Options that exclude each other, in the order in which they are checked.
const EXCLUSIVE_PAIRS: [(&str, &str); 4] = [
    (FULL_PCPUS_ONLY, DISTRIBUTE_ACROSS_CORES),
    (DISTRIBUTE_ACROSS_NUMA, DISTRIBUTE_ACROSS_CORES),
    (PREFER_ALIGN_BY_UNCORE_CACHE, DISTRIBUTE_ACROSS_CORES),
    (PREFER_ALIGN_BY_UNCORE_CACHE, DISTRIBUTE_ACROSS_NUMA),
];

/// Setting `cpuManagerPolicy` with its options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CpuPolicy {
    /// Containers run on all CPUs.
    None,
    /// Containers of Guaranteed pods with whole CPUs get exclusive ones.
    Static(StaticOptions),
}

/// Options of the static policy; all are off by default.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StaticOptions {
    /// `full-pcpus-only`: only whole physical cores are assigned.
    pub full_cores_only: bool,
    /// `strict-cpu-reservation`: reserved CPUs are not in the shared pool either.
    pub strict_reservation: bool,
    /// `prefer-align-cpus-by-uncorecache`: uncore caches are tried before cores.
    pub prefers_uncore_cache: bool,
    /// `distribute-cpus-across-numa`: spreads evenly over NUMA nodes if one node does not suffice.
    pub distributes_over_nodes: bool,
    /// `align-by-socket`: hints and allocations are aligned to sockets.
    pub aligns_by_socket: bool,
    /// `distribute-cpus-across-cores`: threads of different cores are taken first.
    pub spreads_over_cores: bool,
    /// Gate `PodLevelResourceManagers`, no option of the configuration: whether pods with pod-level resources get CPUs.
    pub pod_level: PodLevelManagement,
}

/// What decides, apart from their values, whether options are permitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuPolicyContext {
    /// Feature gate `CPUManagerPolicyBetaOptions`.
    pub beta_options: bool,
    /// Feature gate `CPUManagerPolicyAlphaOptions`.
    pub alpha_options: bool,
    /// Whether the policy of the topology manager is `single-numa-node`.
    pub is_single_numa_node: bool,
    /// Number of sockets of the machine.
    pub sockets: usize,
    /// Number of NUMA nodes of the machine that have CPUs.
    pub nodes: usize,
}

/// The agent cannot start with this policy; the texts are the reference's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CpuPolicyError {
    /// The policy does not exist.
    #[error("unknown policy: \"{0}\"")]
    UnknownPolicy(String),
    /// The policy `none` has no options. The options are formatted as Go's `map[name:value …]`.
    #[error("None policy: received unsupported options={0}")]
    OptionsOfNone(String),
    /// The option does not exist.
    #[error("unknown CPU Manager Policy option: {}", quoted(.0))]
    UnknownOption(String),
    /// The feature gate of the option's level is off.
    #[error("CPU Manager Policy {level}-level Options not enabled, but option {} provided", quoted(.option))]
    LevelDisabled {
        /// `Alpha` or `Beta`.
        level: &'static str,
        /// Name of the option.
        option: String,
    },
    /// The value is no boolean.
    #[error("bad value for option {}: strconv.ParseBool: parsing {}: invalid syntax", quoted(.option), quoted(.value))]
    BadValue {
        /// Name of the option.
        option: String,
        /// Value as configured.
        value: String,
    },
    /// Two options exclude each other.
    #[error("static policy options {0} and {1} can not be used at the same time")]
    Incompatible(&'static str, &'static str),
    /// Alignment to sockets contradicts alignment to one NUMA node. The misspelling is the reference's.
    #[error("Topolgy manager single-numa-node policy is incompatible with CPUManager align-by-socket policy option")]
    SocketsWithSingleNode,
    /// A NUMA node spans several sockets.
    #[error("Align by socket is not compatible with hardware where number of sockets are more than number of NUMA")]
    MoreSocketsThanNodes,
}

impl CpuPolicy {
    /// Parses the policy. Options are checked by name in ascending order, so the first error is reproducible.
    ///
    /// # Errors
    /// An unknown policy or option, an option that is not permitted, or a value that is no boolean.
    pub fn parse(
        name: &str,
        options: &BTreeMap<String, String>,
        context: CpuPolicyContext,
    ) -> Result<Self, CpuPolicyError> {
        match name {
            "none" if options.is_empty() => Ok(Self::None),
            "none" => {
                let options: Vec<String> = options.iter().map(|(name, value)| format!("{name}:{value}")).collect();
                Err(CpuPolicyError::OptionsOfNone(format!("map[{}]", options.join(" "))))
            }
            "static" => StaticOptions::parse(options, context).map(Self::Static),
            _ => Err(CpuPolicyError::UnknownPolicy(name.to_owned())),
        }
    }

    /// Returns the value of the setting and of the field `policyName` in the checkpoint.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Static(_) => "static",
        }
    }
}

impl StaticOptions {
    fn parse(options: &BTreeMap<String, String>, context: CpuPolicyContext) -> Result<Self, CpuPolicyError> {
        let mut parsed = Self::default();
        for (name, value) in options {
            check_level(name, context)?;
            let field = parsed.field(name)?;
            *field = go_bool::parse(value)
                .ok_or_else(|| CpuPolicyError::BadValue { option: name.clone(), value: value.clone() })?;
        }
        for (first, second) in EXCLUSIVE_PAIRS {
            if *parsed.field(first)? && *parsed.field(second)? {
                return Err(CpuPolicyError::Incompatible(first, second));
            }
        }
        if parsed.aligns_by_socket && context.is_single_numa_node {
            return Err(CpuPolicyError::SocketsWithSingleNode);
        }
        if parsed.aligns_by_socket && context.sockets > context.nodes {
            return Err(CpuPolicyError::MoreSocketsThanNodes);
        }
        Ok(parsed)
    }

    fn field(&mut self, name: &str) -> Result<&mut bool, CpuPolicyError> {
        match name {
            FULL_PCPUS_ONLY => Ok(&mut self.full_cores_only),
            STRICT_CPU_RESERVATION => Ok(&mut self.strict_reservation),
            PREFER_ALIGN_BY_UNCORE_CACHE => Ok(&mut self.prefers_uncore_cache),
            DISTRIBUTE_ACROSS_NUMA => Ok(&mut self.distributes_over_nodes),
            ALIGN_BY_SOCKET => Ok(&mut self.aligns_by_socket),
            DISTRIBUTE_ACROSS_CORES => Ok(&mut self.spreads_over_cores),
            _ => Err(CpuPolicyError::UnknownOption(name.to_owned())),
        }
    }

    /// Takes `count` of the candidates with the allocator that the options choose.
    ///
    /// # Errors
    /// There are fewer candidates.
    pub(super) fn take(
        self,
        topology: &CpuTopology,
        candidates: &CpuSet,
        count: usize,
    ) -> Result<CpuSet, NotEnoughCpus> {
        if count == 0 {
            return Ok(CpuSet::default());
        }
        if self.distributes_over_nodes {
            let group_size = if self.full_cores_only { topology.cpus_per_core().max(1) } else { 1 };
            return take_distributed(topology, candidates, count, group_size);
        }
        let options = AllocatorOptions {
            prefers_uncore_cache: self.prefers_uncore_cache,
            spreads_over_cores: self.spreads_over_cores,
        };
        take_packed(topology, candidates, count, options)
    }
}

/// Checks the feature gate of an option.
fn check_level(option: &str, context: CpuPolicyContext) -> Result<(), CpuPolicyError> {
    let (level, is_enabled) = match option {
        DISTRIBUTE_ACROSS_NUMA => ("Beta", context.beta_options),
        ALIGN_BY_SOCKET | DISTRIBUTE_ACROSS_CORES => ("Alpha", context.alpha_options),
        // Stable options have no gate; unknown ones are refused as such.
        _ => return Ok(()),
    };
    if is_enabled { Ok(()) } else { Err(CpuPolicyError::LevelDisabled { level, option: option.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::machines::{machine_a, machine_b, machine_c};

    /// Options by name.
    type Listed<'a> = &'a [(&'a str, &'a str)];

    const ALL: CpuPolicyContext =
        CpuPolicyContext { beta_options: true, alpha_options: true, is_single_numa_node: false, sockets: 2, nodes: 2 };

    fn options(options: Listed<'_>) -> BTreeMap<String, String> {
        options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn parse(listed: Listed<'_>, context: CpuPolicyContext) -> Result<CpuPolicy, CpuPolicyError> {
        CpuPolicy::parse("static", &options(listed), context)
    }

    #[test]
    fn options_set_their_fields() {
        let none = StaticOptions::default();
        let cases: [(Listed<'_>, StaticOptions); 9] = [
            (&[], none),
            (&[(FULL_PCPUS_ONLY, "true")], StaticOptions { full_cores_only: true, ..none }),
            (&[(STRICT_CPU_RESERVATION, "1")], StaticOptions { strict_reservation: true, ..none }),
            (&[(PREFER_ALIGN_BY_UNCORE_CACHE, "t")], StaticOptions { prefers_uncore_cache: true, ..none }),
            (&[(DISTRIBUTE_ACROSS_NUMA, "TRUE")], StaticOptions { distributes_over_nodes: true, ..none }),
            (&[(ALIGN_BY_SOCKET, "True")], StaticOptions { aligns_by_socket: true, ..none }),
            (&[(DISTRIBUTE_ACROSS_CORES, "T")], StaticOptions { spreads_over_cores: true, ..none }),
            (&[(FULL_PCPUS_ONLY, "false"), (DISTRIBUTE_ACROSS_CORES, "0")], none),
            (
                &[(FULL_PCPUS_ONLY, "true"), (DISTRIBUTE_ACROSS_NUMA, "true")],
                StaticOptions { full_cores_only: true, distributes_over_nodes: true, ..none },
            ),
        ];
        for (listed, expected) in cases {
            assert_eq!(parse(listed, ALL), Ok(CpuPolicy::Static(expected)), "{listed:?}");
        }
    }

    #[test]
    fn errors_have_the_texts_of_the_reference() {
        let no_beta = CpuPolicyContext { beta_options: false, ..ALL };
        let no_alpha = CpuPolicyContext { alpha_options: false, ..ALL };
        let single_node = CpuPolicyContext { is_single_numa_node: true, ..ALL };
        let more_sockets = CpuPolicyContext { nodes: 1, ..ALL };
        let cases: [(Listed<'_>, CpuPolicyContext, &str); 9] = [
            (&[("x", "y")], ALL, "unknown CPU Manager Policy option: \"x\""),
            (
                &[(ALIGN_BY_SOCKET, "true")],
                no_alpha,
                "CPU Manager Policy Alpha-level Options not enabled, but option \"align-by-socket\" provided",
            ),
            (
                &[(DISTRIBUTE_ACROSS_CORES, "false")],
                no_alpha,
                "CPU Manager Policy Alpha-level Options not enabled, but option \"distribute-cpus-across-cores\" \
                 provided",
            ),
            (
                &[(DISTRIBUTE_ACROSS_NUMA, "x")],
                no_beta,
                "CPU Manager Policy Beta-level Options not enabled, but option \"distribute-cpus-across-numa\" \
                 provided",
            ),
            (
                &[(FULL_PCPUS_ONLY, "yes")],
                ALL,
                "bad value for option \"full-pcpus-only\": strconv.ParseBool: parsing \"yes\": invalid syntax",
            ),
            (
                &[(ALIGN_BY_SOCKET, "true")],
                single_node,
                "Topolgy manager single-numa-node policy is incompatible with CPUManager align-by-socket policy option",
            ),
            (
                &[(ALIGN_BY_SOCKET, "true")],
                more_sockets,
                "Align by socket is not compatible with hardware where number of sockets are more than number of NUMA",
            ),
            // The first option by name is reported.
            (&[("x", "1"), ("a", "1")], ALL, "unknown CPU Manager Policy option: \"a\""),
            (
                &[(STRICT_CPU_RESERVATION, ""), (FULL_PCPUS_ONLY, "")],
                ALL,
                "bad value for option \"full-pcpus-only\": strconv.ParseBool: parsing \"\": invalid syntax",
            ),
        ];
        for (listed, context, expected) in cases {
            let error = parse(listed, context).expect_err(expected);
            assert_eq!(error.to_string(), expected, "{listed:?}");
        }
    }

    #[test]
    fn some_options_exclude_each_other() {
        for (first, second) in [
            (FULL_PCPUS_ONLY, DISTRIBUTE_ACROSS_CORES),
            (DISTRIBUTE_ACROSS_NUMA, DISTRIBUTE_ACROSS_CORES),
            (PREFER_ALIGN_BY_UNCORE_CACHE, DISTRIBUTE_ACROSS_CORES),
            (PREFER_ALIGN_BY_UNCORE_CACHE, DISTRIBUTE_ACROSS_NUMA),
        ] {
            let error = parse(&[(second, "true"), (first, "true")], ALL).expect_err(first);
            let expected = format!("static policy options {first} and {second} can not be used at the same time");
            assert_eq!(error.to_string(), expected);
            assert!(parse(&[(second, "true"), (first, "false")], ALL).is_ok(), "{first} is off");
        }
    }

    #[test]
    fn an_option_that_is_off_needs_no_machine_that_fits() {
        let context = CpuPolicyContext { is_single_numa_node: true, nodes: 1, ..ALL };
        let expected = Ok(CpuPolicy::Static(StaticOptions::default()));
        assert_eq!(parse(&[(ALIGN_BY_SOCKET, "false")], context), expected);
    }

    #[test]
    fn options_choose_the_allocator() {
        let none = StaticOptions::default();
        let distributed = StaticOptions { distributes_over_nodes: true, ..none };
        for (case, options, topology, count, expected) in [
            ("AC-06b-6", none, machine_b(), 8, "0-2,4,6-8,10"),
            ("AC-06b-7", StaticOptions { spreads_over_cores: true, ..none }, machine_b(), 8, "0-4,6,8,10"),
            ("AC-06b-8", none, machine_c(), 20, "0-9,40-49"),
            ("AC-06b-9", distributed, machine_c(), 26, "0-6,10-16,40-45,50-55"),
            (
                "AC-06b-10",
                StaticOptions { full_cores_only: true, ..distributed },
                machine_c(),
                26,
                "0-6,10-15,40-46,50-55",
            ),
            ("nothing", distributed, machine_c(), 0, ""),
        ] {
            let taken = options.take(&topology, &topology.all(), count).expect(case);
            assert_eq!(taken.to_string(), expected, "{case}");
        }
        // Two uncore caches of four CPUs, one of them with two free ones.
        let mut topology = machine_a();
        topology.cpus.values_mut().for_each(|info| info.uncore_cache = info.core / 2);
        let candidates = topology.all().difference(&topology.select(|info| info.core == 0));
        for (prefers_uncore_cache, expected) in [(false, "1-2,5-6"), (true, "2-3,6-7")] {
            let taken = StaticOptions { prefers_uncore_cache, ..none }.take(&topology, &candidates, 4).expect("enough");
            assert_eq!(taken.to_string(), expected);
        }
    }

    #[test]
    fn policies_are_parsed_by_name() {
        assert_eq!(CpuPolicy::parse("none", &options(&[]), ALL), Ok(CpuPolicy::None));
        for policy in [CpuPolicy::None, CpuPolicy::Static(StaticOptions::default())] {
            assert_eq!(CpuPolicy::parse(policy.as_str(), &options(&[]), ALL), Ok(policy));
        }
        let error = |name: &str, listed: Listed<'_>| {
            CpuPolicy::parse(name, &options(listed), ALL).expect_err("an error").to_string()
        };
        assert_eq!(error("x", &[]), "unknown policy: \"x\"");
        assert_eq!(error("none", &[("k", "v"), ("a", "b")]), "None policy: received unsupported options=map[a:b k:v]");
    }
}

//! Validation of flags, TLS options, authentication, reservations, and addresses at startup. Pure.
//!
//! The reference checks these settings only on its way to running. Spec 01 §2.3, §4 (texts marked ▸), §12, §14.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::{
    eviction,
    fields::KubeletConfiguration,
    flags::{KubeletFlags, sloppy_ip},
    host::HostFacts,
    names,
    notice::Notice,
    text::{list, quote},
    tls,
};
use berth_types::{CpuSet, quantity::Amount};

const LABELS: [&str; 11] = [
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];
const LABEL_PREFIXES: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];

/// Validates `--node-labels`.
///
/// # Errors
/// Labels that a node may not set on itself, or malformed labels.
pub fn node_labels(labels: &BTreeMap<String, String>) -> Result<(), String> {
    let below = |domain: &str, root: &str| {
        domain == root || domain.strip_suffix(root).is_some_and(|prefix| prefix.ends_with('.'))
    };
    let is_foreign = |key: &&String| {
        let domain = key.split_once('/').map_or("", |(domain, _)| domain);
        let reserved = below(domain, "kubernetes.io") || below(domain, "k8s.io");
        let ours = LABELS.contains(&key.as_str()) || LABEL_PREFIXES.iter().any(|root| below(domain, root));
        reserved && !ours
    };
    let unknown: Vec<&String> = labels.keys().filter(is_foreign).collect();
    if !unknown.is_empty() {
        return Err(format!(
            "unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: {}\n--node-labels in the \
             'kubernetes.io' namespace must begin with an allowed prefix ({}) or be in the specifically allowed set ({})",
            list(unknown),
            LABEL_PREFIXES.join(", "),
            LABELS.join(", ")
        ));
    }
    let malformed: Vec<String> = labels
        .iter()
        .filter_map(|(key, value)| {
            let reasons = [names::qualified_name(key), names::label_value(value)].concat();
            (!reasons.is_empty()).then(|| format!("'{key}' - {}", reasons.join("; ")))
        })
        .collect();
    if malformed.is_empty() { Ok(()) } else { Err(format!("invalid node labels: {}", malformed.join("; "))) }
}

/// Validates the TLS options.
///
/// # Errors
/// The first unknown option.
pub fn tls_options(c: &KubeletConfiguration) -> Result<Vec<Notice>, String> {
    let mut notices = Vec::new();
    for name in &c.tls_cipher_suites {
        match tls::cipher_suite(name) {
            Some(tls::Strength::Secure) => {}
            Some(tls::Strength::Insecure) => notices.push(Notice::InsecureCipher { name: name.clone() }),
            None => return Err(format!("Cipher suite {name} not supported or doesn't exist")),
        }
    }
    if !tls::is_version(&c.tls_min_version) {
        return Err(format!("unknown tls version {}", quote(&c.tls_min_version)));
    }
    if c.tls_min_version == "VersionTLS13" && !c.tls_cipher_suites.is_empty() {
        notices.push(Notice::CipherSuitesIgnored);
    }
    let mut seen = BTreeSet::new();
    for &curve in &c.tls_curve_preferences {
        if !(1..=65_535).contains(&curve) {
            return Err(format!("curve preference {curve} is out of range (must be 1-65535)"));
        }
        if !seen.insert(curve) {
            return Err(format!("duplicate curve preference {curve}"));
        }
        if !tls::CURVES.contains(&curve) {
            return Err(format!("curve preference {curve} is not supported by the current Go version"));
        }
    }
    Ok(notices)
}

/// Validates the remaining settings before anything is started.
///
/// # Errors
/// The first failure.
pub fn run(c: &KubeletConfiguration, flags: &KubeletFlags, host: &HostFacts) -> Result<Vec<Notice>, String> {
    if flags.exit_on_lock_contention && flags.lock_file.is_empty() {
        return Err("cannot exit on lock file contention: no lock file specified".to_owned());
    }
    if !matches!(flags.cloud_provider.as_str(), "" | "external") {
        return Err(format!(
            "cloud provider {} was specified, but built-in cloud providers are disabled. Please set \
             --cloud-provider=external and migrate to an external cloud provider",
            quote(&flags.cloud_provider)
        ));
    }
    if !flags.is_standalone() && c.kube_api_qps > 0 && c.kube_api_burst == 0 {
        return Err("failed to initialize kubelet client: burst is required to be greater than 0 when RateLimiter is \
                    not set and QPS is set to greater than 0"
            .to_owned());
    }
    authentication(c, flags)?;
    reservations(c, host)?;
    eviction::thresholds(c)?;
    qos_reserved(&c.qos_reserved)?;
    let ips = node_ips(&flags.node_ip)?;
    let mut notices = Vec::new();
    if !ips.ignored.is_empty() {
        notices.push(Notice::BadNodeIps { ips: ips.ignored });
    }
    notices.extend(swap(c, flags, host)?);
    notices.extend(kubelet_object(c)?);
    Ok(notices)
}

/// Validates swap settings (spec 05 §6, 06 §2). A node that authorizes requests itself often runs on a workstation,
/// where swap is usual: it gets a notice instead of an error.
fn swap(c: &KubeletConfiguration, flags: &KubeletFlags, host: &HostFacts) -> Result<Option<Notice>, String> {
    if c.memory_swap.swap_behavior == "LimitedSwap" && host.cgroup_v1 {
        return Err("swap feature is enabled and LimitedSwap but it is only supported with cgroupv2".to_owned());
    }
    if !(c.fail_swap_on && host.has_swap) {
        return Ok(None);
    }
    if flags.is_its_own_authority() {
        return Ok(Some(Notice::SwapIsOn));
    }
    Err("running with swap on is not supported, please disable swap or set --fail-swap-on flag to false".to_owned())
}

fn authentication(c: &KubeletConfiguration, flags: &KubeletFlags) -> Result<(), String> {
    if !matches!(c.authorization.mode.as_str(), "AlwaysAllow" | "Webhook") {
        return Err(format!("unknown authorization mode {}", c.authorization.mode));
    }
    if !flags.standalone_authorization.is_empty() {
        standalone_policy(c, flags)?;
    }
    if flags.is_its_own_authority() {
        return Ok(());
    }
    let hint = "standalone mode requires authentication.webhook.enabled: false and authorization.mode: AlwaysAllow";
    if flags.is_standalone() && c.authentication.webhook.enabled {
        return Err(format!("no client provided, cannot use webhook authentication ({hint})"));
    }
    if flags.is_standalone() && c.authorization.mode == "Webhook" {
        return Err(format!("no client provided, cannot use webhook authorization ({hint})"));
    }
    Ok(())
}

/// Rejects a standalone policy that would never be evaluated, because that is a dangerous mistake.
fn standalone_policy(c: &KubeletConfiguration, flags: &KubeletFlags) -> Result<(), String> {
    if !flags.is_standalone() {
        return Err("--standalone-authorization cannot be combined with --kubeconfig".to_owned());
    }
    if c.authorization.mode == "AlwaysAllow" {
        return Err("--standalone-authorization requires authorization.mode: Webhook; with AlwaysAllow, all requests \
                    are authorized"
            .to_owned());
    }
    Ok(())
}

/// Resources reserved for the system and node agents, with the CPUs of `reservedSystemCPUs` included.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Reservations {
    /// `kubeReserved`.
    pub kube: BTreeMap<String, Amount>,
    /// `systemReserved`.
    pub system: BTreeMap<String, Amount>,
    /// `reservedSystemCPUs`.
    pub cpus: CpuSet,
}

/// Parses the reservations (spec 01 §14).
///
/// # Errors
/// A resource that cannot be reserved, or a CPU that does not exist.
pub fn reservations(c: &KubeletConfiguration, host: &HostFacts) -> Result<Reservations, String> {
    let reserved = CpuSet::parse(&c.reserved_system_cpus).map_err(|e| format!("unable to parse reserved-cpus: {e}"))?;
    if let Some(online) = host.online_cpus.as_ref().filter(|online| !reserved.is_subset(online)) {
        return Err(format!("reserved-cpus: {reserved} is not a subset of online-cpus: {online}"));
    }
    let mut c = c.clone();
    let _same_again = overwrite_cpus(&mut c);
    Ok(Reservations {
        kube: amounts(&c.kube_reserved).map_err(|e| format!("--kube-reserved value failed to parse: {e}"))?,
        system: amounts(&c.system_reserved).map_err(|e| format!("--system-reserved value failed to parse: {e}"))?,
        cpus: reserved,
    })
}

/// If individual CPUs are reserved, makes their number the only CPU reservation; `/configz` shows the result.
pub fn overwrite_cpus(c: &mut KubeletConfiguration) -> Option<Notice> {
    let count =
        CpuSet::parse(&c.reserved_system_cpus).ok().map(|reserved| reserved.len()).filter(|count| *count > 0)?;
    let before = (c.kube_reserved.clone(), c.system_reserved.clone());
    c.kube_reserved.remove("cpu");
    c.system_reserved.insert("cpu".to_owned(), count.to_string());
    let after = (c.kube_reserved.clone(), c.system_reserved.clone());
    Some(Notice::CpusOverwritten { before, after })
}

fn amounts(map: &BTreeMap<String, String>) -> Result<BTreeMap<String, Amount>, String> {
    map.iter()
        .map(|(name, text)| {
            if !matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage" | "pid") {
                return Err(format!("cannot reserve {} resource", quote(name)));
            }
            let amount = Amount::parse(text)
                .map_err(|e| format!("failed to parse quantity {} for {} resource: {e}", quote(text), quote(name)))?;
            if amount.is_negative() {
                return Err(format!("resource quantity for {} cannot be negative: {text}", quote(name)));
            }
            Ok((name.clone(), amount))
        })
        .collect()
}

fn qos_reserved(map: &BTreeMap<String, String>) -> Result<(), String> {
    for (name, share) in map {
        let failed = |cause: String| format!("--qos-reserved value failed to parse: {cause}");
        if name != "memory" {
            return Err(failed(format!("cannot reserve {} resource", quote(name))));
        }
        percentage(share).map_err(|cause| {
            failed(format!("failed to parse percentage {} for {} resource: {cause}", quote(share), quote(name)))
        })?;
    }
    Ok(())
}

/// Returns the percentage of `qosReserved` for memory, 0 to 100; `None` if it is not set or not valid.
pub fn reserved_memory_percent(qos_reserved: &BTreeMap<String, String>) -> Option<u8> {
    percentage(qos_reserved.get("memory")?).ok()
}

fn percentage(text: &str) -> Result<u8, String> {
    if !text.ends_with('%') {
        return Err(format!("percentage expected, got '{text}'"));
    }
    let number = text.trim_end_matches('%').parse::<i64>();
    let number = number.map_err(|_| format!("invalid number in percentage '{text}'"))?;
    u8::try_from(number)
        .ok()
        .filter(|percent| *percent <= 100)
        .ok_or_else(|| "percentage must be between 0 and 100".to_owned())
}

/// Addresses of `--node-ip`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodeIps {
    /// No address, one address, or one address per family.
    pub ips: Vec<IpAddr>,
    /// Values that are not addresses; they are ignored.
    pub ignored: Vec<String>,
}

/// Parses `--node-ip` (spec 01 §12.2).
///
/// # Errors
/// The addresses do not form a single-stack or dual-stack node.
pub fn node_ips(text: &str) -> Result<NodeIps, String> {
    let mut found = NodeIps::default();
    for item in text.split(',').map(str::trim).filter(|_| !text.is_empty()) {
        match sloppy_ip(item) {
            Some(ip) => found.ips.push(ip),
            None => found.ignored.push(item.to_owned()),
        }
    }
    let bad = |why: &str| Err(format!("bad --node-ip {}: {why}", quote(text)));
    match found.ips[..] {
        [] | [_] => Ok(found),
        [a, b] if a.is_ipv4() != b.is_ipv4() => {
            if a.is_unspecified() || b.is_unspecified() {
                return bad("dual-stack node IP cannot include '0.0.0.0' or '::'");
            }
            Ok(found)
        }
        _ => bad("must contain either a single IP or a dual-stack pair of IPs"),
    }
}

/// Applies the checks that the reference performs while it constructs the kubelet object.
fn kubelet_object(c: &KubeletConfiguration) -> Result<Vec<Notice>, String> {
    let failed = |cause: String| format!("failed to create kubelet: {cause}");
    if c.sync_frequency.nanos() <= 0 {
        return Err(failed(format!("invalid sync frequency {}", c.sync_frequency.nanos())));
    }
    if !matches!(c.config_map_and_secret_change_detection_strategy.as_str(), "Get" | "Cache" | "Watch") {
        return Err(failed(format!(
            "unknown configmap and secret manager mode: {}",
            c.config_map_and_secret_change_detection_strategy
        )));
    }
    Amount::parse(&c.container_log_max_size).map_err(|e| {
        failed(format!(
            "failed to initialize container log manager: failed to parse container log max size {}: {e}",
            quote(&c.container_log_max_size)
        ))
    })?;
    let mut notices: Vec<Notice> = c
        .cluster_dns
        .iter()
        .filter(|ip| sloppy_ip(ip).is_none())
        .map(|ip| Notice::BadClusterDns { ip: ip.clone() })
        .collect();
    let outside = !c.kube_reserved_cgroup.is_empty()
        && !c.kubelet_cgroups.is_empty()
        && !c.kubelet_cgroups.starts_with(&c.kube_reserved_cgroup);
    if outside {
        notices.push(Notice::CgroupOutsideReservation);
    }
    notices.extend(insecure(c));
    let unset: Vec<&'static str> = ["nodefs.available", "nodefs.inodesFree", "imagefs.available"]
        .into_iter()
        .filter(|signal| !c.eviction_hard.contains_key(*signal))
        .collect();
    if !unset.is_empty() {
        notices.push(Notice::EvictionSignalsUnset { signals: unset });
    }
    Ok(notices)
}

/// Returns a notice per setting that permits access without authentication or authorization.
fn insecure(c: &KubeletConfiguration) -> Vec<Notice> {
    let mut notices = Vec::new();
    let mut report = |field, value: String| notices.push(Notice::Insecure { field, value });
    if c.authentication.anonymous.enabled {
        report("authentication.anonymous.enabled", "true".to_owned());
    }
    if c.authorization.mode == "AlwaysAllow" {
        report("authorization.mode", "AlwaysAllow".to_owned());
    }
    if c.read_only_port != 0 {
        report("readOnlyPort", c.read_only_port.to_string());
    }
    notices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::defaults;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_node_may_not_give_itself_every_label() {
        for (key, value, good) in [
            ("a", "b", true),
            ("example.com/a", "", true),
            ("kubernetes.io/os", "linux", true),
            ("node.kubernetes.io/x", "y", true),
            ("sub.kubelet.kubernetes.io/x", "y", true),
            ("beta.kubernetes.io/x", "y", false), // AC-01-36
            ("k8s.io/x", "y", false),
            ("notk8s.io/x", "y", true),
            ("a b", "c", false),
            ("a", "b c", false),
        ] {
            assert_eq!(node_labels(&map(&[(key, value)])).is_ok(), good, "{key}={value}");
        }
        let error = node_labels(&map(&[("k8s.io/b", ""), ("beta.kubernetes.io/x", "y")])).expect_err("AC-01-36");
        assert!(
            error.starts_with(
                "unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: [beta.kubernetes.io/x \
                 k8s.io/b]\n--node-labels in the 'kubernetes.io' namespace must begin with an allowed prefix \
                 (kubelet.kubernetes.io, node.kubernetes.io) or be in the specifically allowed set \
                 (beta.kubernetes.io/arch, "
            ),
            "{error}"
        );
    }

    #[test]
    fn node_addresses_are_one_or_a_pair() {
        for (text, count) in [("", 0), ("1.2.3.4", 1), ("::1, 1.2.3.4", 2), ("x,1.2.3.4", 1), ("010.1.2.3", 1)] {
            assert_eq!(node_ips(text).map(|found| found.ips.len()), Ok(count), "{text}");
        }
        for (text, why) in [
            ("1.2.3.4,5.6.7.8", "must contain either a single IP or a dual-stack pair of IPs"), // AC-01-35
            ("1.2.3.4,::1,::2", "must contain either a single IP or a dual-stack pair of IPs"),
            ("0.0.0.0,::1", "dual-stack node IP cannot include '0.0.0.0' or '::'"),
        ] {
            assert_eq!(node_ips(text), Err(format!("bad --node-ip \"{text}\": {why}")));
        }
    }

    #[test]
    fn swap_is_refused_unless_it_is_allowed() {
        let on = HostFacts { has_swap: true, ..HostFacts::default() };
        let v1 = HostFacts { cgroup_v1: true, ..HostFacts::default() };
        let config = |fail_swap_on, behavior: &str| {
            let mut config = KubeletConfiguration { fail_swap_on, ..defaults::defaults() };
            config.memory_swap.swap_behavior = behavior.to_owned();
            config
        };
        let judged = |config: &KubeletConfiguration, host: &HostFacts| swap(config, &KubeletFlags::default(), host);
        assert_eq!(judged(&config(true, ""), &HostFacts::default()), Ok(None));
        assert_eq!(judged(&config(false, ""), &on), Ok(None));
        let refused = "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false";
        assert_eq!(judged(&config(true, ""), &on), Err(refused.to_owned()));
        let limited = "swap feature is enabled and LimitedSwap but it is only supported with cgroupv2";
        assert_eq!(judged(&config(true, "LimitedSwap"), &v1), Err(limited.to_owned()));
        let alone = KubeletFlags { is_standalone_authorizer: true, ..KubeletFlags::default() };
        assert_eq!(swap(&config(true, ""), &alone, &on), Ok(Some(Notice::SwapIsOn)));
    }

    #[test]
    fn reservations_know_their_resources() {
        let host = HostFacts { online_cpus: Some((0..4).collect()), ..HostFacts::default() };
        let reserve = |kube: &[(&str, &str)], list: &str| {
            let config = KubeletConfiguration {
                kube_reserved: map(kube),
                reserved_system_cpus: list.to_owned(),
                ..defaults::defaults()
            };
            reservations(&config, &host)
        };
        for (kube, list, error) in [
            (&[("gpu", "1")][..], "", "--kube-reserved value failed to parse: cannot reserve \"gpu\" resource"), // AC-01-39
            (
                &[("cpu", "-1")],
                "",
                "--kube-reserved value failed to parse: resource quantity for \"cpu\" cannot be negative: -1",
            ),
            (&[], "0-7", "reserved-cpus: 0-7 is not a subset of online-cpus: 0-3"),
        ] {
            assert_eq!(reserve(kube, list), Err(error.to_owned()));
        }
        let kept = reserve(&[("cpu", "2"), ("memory", "1Gi")], "0-1,3").expect("good reservations");
        assert_eq!(kept.kube.keys().collect::<Vec<_>>(), ["memory"]);
        assert_eq!((kept.system["cpu"].value(), kept.cpus.len()), (3, 3));
    }

    #[test]
    fn tls_options_are_known_by_name() {
        let judge = |suites: &[&str], version: &str, curves: &[i32]| {
            let config = KubeletConfiguration {
                tls_cipher_suites: suites.iter().map(|s| (*s).to_owned()).collect(),
                tls_min_version: version.to_owned(),
                tls_curve_preferences: curves.to_vec(),
                ..KubeletConfiguration::default()
            };
            tls_options(&config)
        };
        assert_eq!(judge(&["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"], "", &[29, 4588, 23]), Ok(vec![]));
        assert_eq!(judge(&["TLS_AES_128_GCM_SHA256"], "VersionTLS13", &[]), Ok(vec![Notice::CipherSuitesIgnored]));
        assert!(matches!(
            judge(&["TLS_RSA_WITH_RC4_128_SHA"], "", &[]).as_deref(),
            Ok([Notice::InsecureCipher { .. }])
        ));
        for (suites, version, curves, error) in [
            (&["TLS_X"][..], "", &[][..], "Cipher suite TLS_X not supported or doesn't exist"),
            (&[], "VersionTLS14", &[], "unknown tls version \"VersionTLS14\""),
            (&[], "", &[0], "curve preference 0 is out of range (must be 1-65535)"),
            (&[], "", &[29, 29], "duplicate curve preference 29"),
            (&[], "", &[7], "curve preference 7 is not supported by the current Go version"),
        ] {
            assert_eq!(judge(suites, version, curves), Err(error.to_owned()));
        }
    }

    #[test]
    fn the_last_checks_report_in_order() {
        let standalone = KubeletFlags::default();
        let lock = KubeletFlags { exit_on_lock_contention: true, ..KubeletFlags::default() };
        let cloud = KubeletFlags { cloud_provider: "aws".to_owned(), ..KubeletFlags::default() };
        let mut open = defaults::defaults();
        open.authentication.webhook.enabled = false;
        open.authorization.mode = "AlwaysAllow".to_owned();
        let webhook_mode = {
            let mut c = open.clone();
            c.authorization.mode = "Webhook".to_owned();
            c
        };
        let other_mode = {
            let mut c = open.clone();
            c.authorization.mode = "RBAC".to_owned();
            c
        };
        let soft = {
            let mut c = open.clone();
            c.eviction_soft = map(&[("memory.available", "1Gi")]);
            c
        };
        let qos = {
            let mut c = open.clone();
            c.qos_reserved = map(&[("cpu", "1%")]);
            c
        };
        let negative = {
            let mut c = open.clone();
            c.sync_frequency = crate::GoDuration::from_nanos(-1);
            c
        };
        for (config, flags, error) in [
            (&open, &lock, "cannot exit on lock file contention: no lock file specified"),
            (&open, &cloud, "cloud provider \"aws\" was specified, but built-in cloud providers are disabled."),
            (&defaults::defaults(), &standalone, "no client provided, cannot use webhook authentication"), // AC-01-24
            (&webhook_mode, &standalone, "no client provided, cannot use webhook authorization"),
            (&other_mode, &standalone, "unknown authorization mode RBAC"),
            (&soft, &standalone, "grace period must be specified for the soft eviction threshold memory.available"),
            (&qos, &standalone, "--qos-reserved value failed to parse: cannot reserve \"cpu\" resource"),
            (&negative, &standalone, "failed to create kubelet: invalid sync frequency -1"),
        ] {
            let found = run(config, flags, &HostFacts::default());
            assert!(found.as_ref().is_err_and(|e| e.starts_with(error)), "{error}: {found:?}");
        }
        assert!(run(&open, &standalone, &HostFacts::default()).is_ok());
        let berth = KubeletFlags { is_standalone_authorizer: true, ..KubeletFlags::default() };
        assert!(run(&defaults::defaults(), &berth, &HostFacts::default()).is_ok(), "it decides itself");
    }

    #[test]
    fn a_policy_that_is_never_consulted_is_refused() {
        let policy = "policy.yaml".to_owned();
        let alone = KubeletFlags { standalone_authorization: policy, ..KubeletFlags::default() };
        let clustered = KubeletFlags { kubeconfig: "k".to_owned(), ..alone.clone() };
        let mut open = defaults::defaults();
        open.authorization.mode = "AlwaysAllow".to_owned();
        for (config, flags, error) in [
            (&defaults::defaults(), &clustered, "--standalone-authorization cannot be combined with --kubeconfig"),
            (&open, &alone, "--standalone-authorization requires authorization.mode: Webhook"),
        ] {
            let found = run(config, flags, &HostFacts::default());
            assert!(found.as_ref().is_err_and(|e| e.starts_with(error)), "{error}: {found:?}");
        }
        assert!(run(&defaults::defaults(), &alone, &HostFacts::default()).is_ok(), "even under kubelet's name");
    }

    #[test]
    fn percentages_of_reserved_requests_are_parsed_as_upstream() {
        let map = |key: &str, value: &str| [(key.to_owned(), value.to_owned())].into();
        for (value, expected) in [
            ("0%", Ok(0)),
            ("100%", Ok(100)),
            ("+5%", Ok(5)),
            ("50%%", Ok(50)),
            ("", Err("percentage expected, got ''")),
            ("a", Err("percentage expected, got 'a'")),
            ("a%", Err("invalid number in percentage 'a%'")),
            ("5.5%", Err("invalid number in percentage '5.5%'")),
            (" 5%", Err("invalid number in percentage ' 5%'")),
            ("200%", Err("percentage must be between 0 and 100")),
            ("-1%", Err("percentage must be between 0 and 100")),
        ] {
            assert_eq!(reserved_memory_percent(&map("memory", value)), expected.ok(), "{value}");
            let error = qos_reserved(&map("memory", value)).err();
            let text = |cause| {
                let start = "--qos-reserved value failed to parse: failed to parse percentage ";
                format!("{start}{} for \"memory\" resource: {cause}", quote(value))
            };
            assert_eq!(error, expected.err().map(text), "{value}");
        }
        assert_eq!(reserved_memory_percent(&map("cpu", "5%")), None);
    }
}

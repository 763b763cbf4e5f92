//! DNS configuration of a pod (resolv.conf). Pure. Implements spec 03a §5.2.
//!
//! Options are in the order in which they first appear (upstream's order is random).

use std::collections::{HashMap, HashSet};

use berth_proto::cri;
use berth_types::{Pod, api, names};

/// Maximum size of resolv.conf, in bytes.
pub const MAX_FILE: u64 = 10 << 20;
const MAX_SERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_LINE: usize = 2048;
/// Number of search domains that cluster DNS prepends to those of the host.
const CLUSTER_SEARCHES: usize = 3;

/// Content of the node's resolv.conf.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostDns {
    /// Addresses of the `nameserver` lines.
    pub servers: Vec<String>,
    /// Domains of the last `search` line.
    pub searches: Vec<String>,
    /// `options` of all lines; for equal names the last.
    pub options: Vec<String>,
}

/// Inputs of a DNS configuration, apart from the pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DnsSettings {
    /// `clusterDNS`: addresses of the cluster's DNS servers.
    pub cluster_dns: Vec<String>,
    /// `clusterDomain`; `""` for none.
    pub cluster_domain: String,
    /// Loopback addresses used without a resolver, by the node's IP families.
    pub loopback: Vec<String>,
}

/// The resolv.conf is malformed; the pod cannot start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("nameserver list is empty ")]
pub struct MalformedResolvConf;

/// Parses a resolv.conf.
///
/// # Errors
/// A `nameserver` line has no address.
pub fn parse(text: &str) -> Result<HostDns, MalformedResolvConf> {
    let mut found = HostDns::default();
    let mut options = Options::default();
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        let mut fields = line.split_whitespace();
        match fields.next() {
            Some("nameserver") => found.servers.push(fields.next().ok_or(MalformedResolvConf)?.to_owned()),
            Some("search") => {
                let searches = fields.filter(|s| *s != ".");
                found.searches = searches.map(|s| s.strip_suffix('.').unwrap_or(s).to_owned()).collect();
            }
            Some("options") => fields.for_each(|option| options.set(option.to_owned())),
            _ => {}
        }
    }
    found.options = options.list;
    Ok(found)
}

fn option_name(option: &str) -> &str {
    option.split_once(':').map_or(option, |(name, _)| name)
}

/// Options in the order in which their names first appear; for equal names the last value wins.
#[derive(Default)]
struct Options {
    list: Vec<String>,
    places: HashMap<String, usize>,
}

impl Options {
    fn set(&mut self, option: String) {
        let name = option_name(&option);
        match self.places.get(name).and_then(|&at| self.list.get_mut(at)) {
            Some(old) => *old = option,
            None => {
                self.places.insert(name.to_owned(), self.list.len());
                self.list.push(option);
            }
        }
    }
}

/// Which DNS servers a pod uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Base {
    /// Those of the cluster.
    Cluster,
    /// Those of the node.
    Host,
    /// Only those of the pod's `dnsConfig`.
    Empty,
}

/// The DNS servers by the pod's policy; unknown policies count as `ClusterFirst`.
pub fn base(pod: &Pod) -> Base {
    match pod.spec().dns_policy.as_deref() {
        Some("None") => Base::Empty,
        Some("Default") => Base::Host,
        Some("ClusterFirstWithHostNet") => Base::Cluster,
        Some("ClusterFirst") if pod.is_host_network() => Base::Host,
        _ => Base::Cluster,
    }
}

/// Whether the node's resolv.conf has to be read for this pod.
pub fn needs_host_file(pod: &Pod) -> bool {
    base(pod) != Base::Empty
}

/// A warning to record as an event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DnsWarning {
    /// Reason of the event.
    pub reason: &'static str,
    /// Message of the event on the pod.
    pub message: String,
    /// Message of the same event on the node, if any.
    pub on_node: Option<String>,
}

/// DNS configuration of a pod with its warnings.
#[derive(Clone, PartialEq, Debug)]
pub struct PodDns {
    /// Configuration for the sandbox.
    pub config: cri::DnsConfig,
    /// Warnings to record as events.
    pub warnings: Vec<DnsWarning>,
}

/// Builds the DNS configuration of a pod; `host` is `None` if `resolvConf` is `""`.
pub fn of_pod(pod: &Pod, settings: &DnsSettings, host: Option<&HostDns>) -> PodDns {
    let mut warnings = Vec::new();
    let nothing = HostDns::default();
    let from_host = host.unwrap_or(&nothing);
    let mut dns = match base(pod) {
        Base::Empty => HostDns::default(),
        Base::Cluster if !settings.cluster_dns.is_empty() => HostDns {
            servers: settings.cluster_dns.clone(),
            searches: cluster_searches(pod.namespace(), &settings.cluster_domain, &from_host.searches),
            options: vec!["ndots:5".to_owned()],
        },
        which => {
            if which == Base::Cluster {
                warnings.push(missing_cluster_dns(pod));
            }
            host.cloned().unwrap_or_else(|| no_resolver(settings))
        }
    };
    if let Some(own) = pod.spec().dns_config.as_ref() {
        append(&mut dns, own);
    }
    fit_servers(&mut dns.servers, &mut warnings);
    fit_searches(&mut dns.searches, &mut warnings);
    PodDns { config: cri::DnsConfig { servers: dns.servers, searches: dns.searches, options: dns.options }, warnings }
}

fn no_resolver(settings: &DnsSettings) -> HostDns {
    let servers = if settings.loopback.is_empty() { vec!["127.0.0.1".to_owned()] } else { settings.loopback.clone() };
    HostDns { servers, searches: vec![".".to_owned()], options: Vec::new() }
}

fn missing_cluster_dns(pod: &Pod) -> DnsWarning {
    let text = "kubelet does not have ClusterDNS IP configured and cannot create Pod using \"ClusterFirst\" policy. \
                Falling back to \"Default\" policy.";
    DnsWarning {
        reason: "MissingClusterDNS",
        message: format!("pod: {:?}. {text}", pod.id().to_string()),
        on_node: Some(text.to_owned()),
    }
}

fn cluster_searches(namespace: &str, domain: &str, host: &[String]) -> Vec<String> {
    if domain.is_empty() {
        return host.to_vec();
    }
    let cluster = [format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.to_owned()];
    without_duplicates(cluster.into_iter().chain(host.iter().cloned()))
}

fn append(dns: &mut HostDns, own: &api::PodDNSConfig) {
    let add = |to: &mut Vec<String>, more: Option<&Vec<String>>| {
        *to = without_duplicates(std::mem::take(to).into_iter().chain(more.into_iter().flatten().cloned()));
    };
    add(&mut dns.servers, own.nameservers.as_ref());
    add(&mut dns.searches, own.searches.as_ref());
    let mut options = Options::default();
    std::mem::take(&mut dns.options).into_iter().for_each(|option| options.set(option));
    for option in own.options.iter().flatten() {
        let Some(name) = option.name.as_deref() else { continue };
        let text = match option.value.as_deref() {
            Some(value) if !value.is_empty() => format!("{name}:{value}"),
            _ => name.to_owned(),
        };
        options.set(text);
    }
    dns.options = options.list;
}

fn without_duplicates(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = HashSet::new();
    all.filter(|item| seen.insert(item.clone())).collect()
}

fn fit_servers(servers: &mut Vec<String>, warnings: &mut Vec<DnsWarning>) {
    if servers.len() <= MAX_SERVERS {
        return;
    }
    servers.truncate(MAX_SERVERS);
    warnings.push(forming(format!(
        "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
        servers.join(" ")
    )));
}

fn fit_searches(searches: &mut Vec<String>, warnings: &mut Vec<DnsWarning>) {
    let asked = searches.len();
    searches.truncate(MAX_SEARCHES);
    // glibc 2.28 aborts on a search path longer than 255 characters.
    searches.retain(|search| search.len() <= names::SUBDOMAIN_MAX);
    let mut line = 0;
    let fitting = searches.iter().take_while(|search| {
        line += search.len() + usize::from(line > 0);
        line <= MAX_SEARCH_LINE
    });
    let fitting = fitting.count();
    searches.truncate(fitting);
    if searches.len() < asked {
        warnings.push(forming(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            searches.join(" ")
        )));
    }
}

fn forming(message: String) -> DnsWarning {
    DnsWarning { reason: "DNSConfigForming", message, on_node: None }
}

/// Checks the limits of the node's file itself: messages of `CheckLimitsForResolvConf`, once at the
/// start of the sync loop.
pub fn check_host_file(path: &str, host: &HostDns, cluster_domain: &str) -> Vec<String> {
    let limit = if cluster_domain.is_empty() { MAX_SEARCHES } else { MAX_SEARCHES - CLUSTER_SEARCHES };
    let mut complaints = Vec::new();
    if host.searches.len() > limit {
        complaints
            .push(format!("Resolv.conf file '{path}' contains search line consisting of more than {limit} domains!"));
    }
    if host.searches.iter().any(|s| s.len() > names::SUBDOMAIN_MAX) {
        complaints.push(format!(
            "Resolv.conf file '{path}' contains a search path which length is more than allowed {} chars!",
            names::SUBDOMAIN_MAX
        ));
    }
    if host.searches.join(" ").len() > MAX_SEARCH_LINE {
        complaints.push(format!(
            "Resolv.conf file '{path}' contains search line which length is more than allowed {MAX_SEARCH_LINE} chars!"
        ));
    }
    complaints
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: Value) -> Pod {
        let mut spec = spec;
        spec["containers"] = json!([{"name": "c"}]);
        let object = json!({"metadata": {"name": "p", "namespace": "a", "uid": "u"}, "spec": spec});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn settings() -> DnsSettings {
        DnsSettings { cluster_dns: vec!["10.0.0.10".into()], cluster_domain: "c.l".into(), loopback: vec![] }
    }

    fn host() -> HostDns {
        parse("nameserver 1.1.1.1\nsearch x\noptions timeout:1\n").expect("well-formed")
    }

    fn check(spec: Value, expected: (&str, &str, &str)) {
        let made = of_pod(&pod(spec.clone()), &settings(), Some(&host())).config;
        let got = (made.servers.join(" "), made.searches.join(" "), made.options.join(" "));
        assert_eq!((got.0.as_str(), got.1.as_str(), got.2.as_str()), expected, "{spec}");
    }

    #[test]
    fn a_file_is_read_line_by_line() {
        let text = "# search no\n  nameserver 1.1.1.1 ignored\nnameserver ::1\n\nsearch a b\n\
                    search . c. d\noptions ndots:2 rotate\noptions ndots:3\nunknown x\n";
        let found = parse(text).expect("well-formed");
        assert_eq!(found.servers, ["1.1.1.1", "::1"]);
        assert_eq!(found.searches, ["c", "d"]);
        assert_eq!(found.options, ["ndots:3", "rotate"]);
        assert_eq!(parse("").expect("empty"), HostDns::default());
        assert_eq!(parse("search a\nnameserver \n"), Err(MalformedResolvConf));
    }

    #[test]
    fn each_policy_has_its_servers() {
        let cluster = ("10.0.0.10", "a.svc.c.l svc.c.l c.l x", "ndots:5");
        let node = ("1.1.1.1", "x", "timeout:1");
        // AC-03a-22
        check(json!({"dnsPolicy": "ClusterFirst"}), cluster);
        check(json!({"dnsPolicy": "Odd"}), cluster);
        check(json!({"dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": true}), cluster);
        check(json!({"dnsPolicy": "ClusterFirst", "hostNetwork": true}), node);
        check(json!({"dnsPolicy": "Default"}), node);
        check(json!({"dnsPolicy": "None"}), ("", "", ""));
    }

    #[test]
    fn the_dns_config_of_the_pod_is_added_and_wins() {
        check(
            json!({"dnsPolicy": "ClusterFirst", "dnsConfig": {
                "nameservers": ["10.0.0.10", "9.9.9.9"], "searches": ["x", "y"],
                "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}]}}),
            ("10.0.0.10 9.9.9.9", "a.svc.c.l svc.c.l c.l x y", "ndots:2 edns0"),
        );
    }

    #[test]
    fn without_cluster_servers_the_nodes_are_taken_with_a_warning() {
        let settings = DnsSettings { cluster_dns: vec![], ..settings() };
        let made = of_pod(&pod(json!({})), &settings, Some(&host()));
        assert_eq!(made.config.servers, ["1.1.1.1"]);
        let [warning] = made.warnings.as_slice() else { panic!("{:?}", made.warnings) };
        assert_eq!(warning.reason, "MissingClusterDNS");
        assert!(warning.message.starts_with("pod: \"p_a(u)\". kubelet does not have"), "{}", warning.message);
        assert!(warning.on_node.is_some());
        assert!(of_pod(&pod(json!({"dnsPolicy": "Default"})), &settings, None).warnings.is_empty());
    }

    #[test]
    fn no_resolver_file_means_a_loopback_server() {
        for (loopback, servers) in [(vec![], vec!["127.0.0.1"]), (vec!["::1".to_owned()], vec!["::1"])] {
            let settings = DnsSettings { loopback, ..settings() };
            let made = of_pod(&pod(json!({"dnsPolicy": "Default"})), &settings, None).config;
            assert_eq!(
                (made.servers, made.searches),
                (servers.into_iter().map(String::from).collect(), vec![".".into()])
            );
        }
    }

    #[test]
    fn no_cluster_domain_leaves_the_nodes_searches() {
        let settings = DnsSettings { cluster_domain: String::new(), ..settings() };
        assert_eq!(of_pod(&pod(json!({})), &settings, Some(&host())).config.searches, ["x"]);
    }

    #[test]
    fn what_is_too_much_is_cut_with_a_warning() {
        let many = |n: usize, len: usize| -> Vec<String> { (0..n).map(|i| format!("{i:0len$}")).collect() };
        for (searches, kept) in [
            (many(32, 3), 32),
            (many(33, 3), 32),
            (vec!["a".repeat(253), "b".repeat(254), "c".into()], 2),
            (many(9, 250), 8),
            (many(32, 63), 32),
            (many(32, 64), 31),
        ] {
            let own = json!({"dnsPolicy": "None", "dnsConfig": {"searches": searches}});
            let made = of_pod(&pod(own), &settings(), None);
            assert_eq!(made.config.searches.len(), kept);
            assert!(made.config.searches.join(" ").len() <= 2048);
            assert_eq!(made.warnings.len(), usize::from(kept < searches.len()));
        }
        let own =
            json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["1.1.1.1", "2.2.2.2", "3.3.3.3", "4.4.4.4"]}});
        let made = of_pod(&pod(own), &settings(), None);
        assert_eq!(
            made.warnings[0].message,
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: \
             1.1.1.1 2.2.2.2 3.3.3.3"
        );
    }

    #[test]
    fn the_nodes_file_is_checked_once() {
        let long = HostDns { searches: (0..30).map(|i| format!("d{i}")).collect(), ..HostDns::default() };
        assert_eq!(check_host_file("/r", &long, ""), Vec::<String>::new());
        assert_eq!(
            check_host_file("/r", &long, "c.l"),
            ["Resolv.conf file '/r' contains search line consisting of more than 29 domains!"]
        );
        let wide = HostDns { searches: vec!["x".repeat(3000)], ..HostDns::default() };
        assert_eq!(check_host_file("/r", &wide, "").len(), 2);
    }
}

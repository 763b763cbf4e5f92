//! Validates DNS settings, host names, and host aliases of a pod. Pure.

use super::{
    field::{FieldErrors, Path},
    names_and_numbers::{ip_address, search_domain},
};
use berth_types::{api, names};

/// Maximum number of name servers.
const MAX_NAMESERVERS: usize = 3;
/// Maximum number of search domains.
const MAX_SEARCHES: usize = 32;
/// Maximum length of the search list, including spaces, in bytes.
const MAX_SEARCH_BYTES: usize = 2048;
/// Maximum length of a host name in the kernel, in bytes.
const MAX_HOSTNAME: usize = 64;

/// Checks the DNS policy and the DNS settings.
pub fn check(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let policy = spec.dns_policy.as_deref();
    let supported = ["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"];
    errors.one_of(&at.child("dnsPolicy"), policy, &supported);
    let at = at.child("dnsConfig");
    match spec.dns_config.as_ref() {
        Some(config) => settings(config, policy == Some("None"), &at, errors),
        None if policy == Some("None") => {
            errors.required(&at, "must provide `dnsConfig` when `dnsPolicy` is None");
        }
        None => {}
    }
}

fn settings(config: &api::PodDNSConfig, must_name_servers: bool, at: &Path, errors: &mut FieldErrors) {
    let servers = config.nameservers.as_deref().unwrap_or_default();
    let at_servers = at.child("nameservers");
    if must_name_servers && servers.is_empty() {
        errors.required(&at_servers, "must provide at least one DNS nameserver when `dnsPolicy` is None");
        return;
    }
    if servers.len() > MAX_NAMESERVERS {
        errors.invalid(&at_servers, servers, &format!("must not have more than {MAX_NAMESERVERS} nameservers"));
    }
    for (i, server) in servers.iter().enumerate() {
        ip_address(server, &at_servers.index(i), errors);
    }
    let searches = config.searches.as_deref().unwrap_or_default();
    let at_searches = at.child("searches");
    if searches.len() > MAX_SEARCHES {
        errors.invalid(&at_searches, searches, &format!("must not have more than {MAX_SEARCHES} search paths"));
    }
    if searches.join(" ").len() > MAX_SEARCH_BYTES {
        let text =
            format!("must not have more than {MAX_SEARCH_BYTES} characters (including spaces) in the search list");
        errors.invalid(&at_searches, searches, &text);
    }
    for (i, search) in searches.iter().enumerate().filter(|(_, search)| *search != ".") {
        let search = search.strip_suffix('.').unwrap_or(search);
        errors.complaints(&at_searches.index(i), search, search_domain(search));
    }
    for (i, option) in config.options.iter().flatten().enumerate() {
        if option.name.as_deref().unwrap_or_default().is_empty() {
            errors.required(&at.child("options").index(i), "must not be empty");
        }
    }
}

/// Checks host name, subdomain, and the host name override.
pub fn host_names(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    for (member, name) in [("hostname", &spec.hostname), ("subdomain", &spec.subdomain)] {
        if let Some(name) = name.as_deref().filter(|name| !name.is_empty()) {
            errors.complaints(&at.child(member), name, names::dns_label(name));
        }
    }
    let Some(name) = spec.hostname_override.as_deref() else { return };
    let at = at.child("hostnameOverride");
    if spec.set_hostname_as_fqdn == Some(true) {
        errors.forbidden(&at, "may not be specified when setHostnameAsFQDN is true");
    }
    if spec.host_network == Some(true) {
        errors.forbidden(&at, "may not be specified when hostNetwork is true");
    }
    if name.len() > MAX_HOSTNAME {
        errors.too_long(&at, MAX_HOSTNAME);
    }
    errors.complaints(&at, name, names::dns_subdomain(name));
}

/// Checks the pod's additions to its hosts file.
pub fn host_aliases(aliases: &[api::HostAlias], at: &Path, errors: &mut FieldErrors) {
    for (i, alias) in aliases.iter().enumerate() {
        let at = at.index(i);
        ip_address(&alias.ip, &at.child("ip"), errors);
        for (j, name) in alias.hostnames.iter().flatten().enumerate() {
            errors.complaints(&at.child("hostnames").index(j), name, names::dns_subdomain(name));
        }
    }
}

//! Fuzz targets of pod parts: resource state files, env files, quantities, field paths, and host names.

use std::collections::BTreeMap;

use berth::runtime::request::hosts;
use berth_types::{
    api, env, env_file, expansion,
    fieldpath::{self, NodeAddresses},
    hash::fnv1a_32,
    hostname::HostName,
    quantity::{Amount, QuantityFormat},
    resource_state,
};

use super::{POD, first_line, text};

/// `allocated_pods_state` and `actuated_pods_state`, as a whole file and as the content of a file with a valid
/// checksum.
pub fn resources_on_disk(data: &[u8]) {
    let content = text(data);
    let checksum = fnv1a_32(format!("(string){content}").as_bytes());
    let sound = serde_json::json!({"data": content, "checksum": checksum}).to_string();
    for file in [data, sound.as_bytes()] {
        let Ok(entries) = resource_state::decode(file) else { continue };
        assert_eq!(resource_state::decode(&resource_state::encode(&entries)).as_ref(), Ok(&entries));
        for entry in entries.values() {
            if let Some(spec) = entry.applied_to(&POD) {
                let applied = POD.with_spec(spec);
                assert!(!entry.differs_from(&applied), "what was applied differs no more");
            }
        }
    }
}

/// An env file; its first line is the key to look up.
pub fn env_file(data: &[u8]) {
    let (key, file) = first_line(data);
    let Ok(Some(value)) = env_file::lookup(&text(file), &key) else { return };
    assert!(!value.contains('\''));
    // A carriage return before a newline is part of the line end, so two of them are read as one.
    if value.contains("\r\n") {
        return;
    }
    assert_eq!(env_file::lookup(&format!("{key}='{value}'\n"), &key), Ok(Some(value)), "written and read");
}

/// A text with `$(NAME)` references, after lines of `NAME=text` that may refer to earlier lines.
pub fn expansion(data: &[u8]) {
    let all = text(data);
    let entry = |line: &str| {
        let (name, value) = line.split_once('=').unwrap_or(("LAST", line));
        api::EnvVar { name: name.to_owned(), value: Some(value.to_owned()), value_from: None }
    };
    let variables: Vec<api::EnvVar> = all.lines().map(entry).collect();
    let own = api::Container { env: Some(variables), ..Default::default() };
    let inputs = env::EnvInputs {
        namespace: "shop",
        devices: &[],
        service_links: Some(false),
        services: Some(&[]),
        config_maps: &Default::default(),
        secrets: &Default::default(),
        files: &Default::default(),
        field: &|_| Err(String::new()),
        resource: &|_| Err(String::new()),
    };
    let Ok(env) = env::build(&own, &inputs) else { return };
    let size: usize = env.iter().map(|(name, value)| name.len() + value.len()).sum();
    assert!(size <= data.len() * 3 + (32 << 20), "{size} bytes of environment");
    let variables = expansion::Variables::new(env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let args: Vec<String> = all.lines().map(str::to_owned).collect();
    let size: usize = variables.expand_all(&args).iter().flatten().map(String::len).sum();
    assert!(size <= data.len() * 3 + (32 << 20), "{size} bytes of arguments");
    drop(all.lines().next().map(|line| variables.expand_sub_path(line)));
}

/// A resource quantity.
pub fn quantity(data: &[u8]) {
    let Ok(amount) = Amount::parse(&text(data)) else { return };
    let canonical = amount.canonical();
    let again = Amount::parse(&canonical).unwrap_or_else(|e| panic!("{canonical}: {e}"));
    assert_eq!(again, amount, "{canonical}");
    assert_eq!(again.canonical(), canonical);
    let rounded = amount.rounded_to_milli();
    assert!(rounded >= amount && rounded.rounded_to_milli() == rounded);
    if !amount.is_negative() {
        assert!(Amount::from_value(amount.value(), QuantityFormat::DecimalSi) >= amount);
    }
    assert!(amount.plus(amount) >= amount || amount.is_negative());
    assert!(amount.minus(amount).is_zero());
    drop((amount.milli(), amount.plus(amount).canonical(), amount.plus(amount).value()));
}

/// Lines: a field path, a resource, a divisor.
pub fn field_path(data: &[u8]) {
    let (path, rest) = first_line(data);
    let (resource, divisor) = first_line(rest);
    let selector = api::ObjectFieldSelector { field_path: path.clone().into_owned(), api_version: None };
    let at = NodeAddresses { node_name: "node-1", host_ips: &[], pod_ips: &[] };
    let as_variable = fieldpath::env_field(&POD, &selector, at);
    let as_file = fieldpath::volume_field(&POD, &path);
    if let (Ok(variable), Ok(file)) = (&as_variable, &as_file) {
        assert_eq!(variable, file);
    }
    let divisor = text(divisor);
    let selector = api::ResourceFieldSelector {
        resource: resource.into_owned(),
        container_name: Some("main".to_owned()),
        divisor: (!divisor.is_empty()).then(|| serde_json::from_value(divisor.into()).expect("a text")),
    };
    if let Ok(value) = fieldpath::resource_value(&POD, &selector, None, &BTreeMap::new()) {
        assert!(value.parse::<i64>().is_ok(), "{value}");
    }
}

/// Lines: host name, subdomain, cluster domain; the rest is the node's hosts file.
pub fn host_names(data: &[u8]) {
    let (name, rest) = first_line(data);
    let (subdomain, rest) = first_line(rest);
    let (domain, node_file) = first_line(rest);
    let mut spec = POD.spec().clone();
    spec.hostname = Some(name.clone().into_owned());
    spec.subdomain = Some(subdomain.into_owned());
    let alias = api::HostAlias { ip: name.into_owned(), hostnames: Some(vec![domain.clone().into_owned()]) };
    let aliases = std::slice::from_ref(&alias);
    assert!(
        hosts::of_node(node_file, aliases).windows(node_file.len().max(1)).any(|w| w == node_file)
            || node_file.is_empty()
    );
    let Ok(found) = HostName::of(&POD.with_spec(spec), &domain) else { return };
    assert!(!found.name.is_empty() && found.name.len() <= 63);
    if let Ok(name) = found.kernel_name(true) {
        assert!(name.len() <= 64);
    }
    assert!(hosts::of_pod(&found, &[[10, 0, 0, 1].into()], aliases).starts_with("# Kubernetes-managed hosts file"));
}

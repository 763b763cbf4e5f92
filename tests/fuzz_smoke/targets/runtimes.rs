//! Fuzz targets: container runtime responses and events, CRI endpoints, and pod DNS.

use berth::{
    pleg::{containerd_events, cri_conversions},
    runtime::request::dns,
};
use berth_cri::socket_path;
use berth_proto::{containerd_events::Envelope, cri};
use berth_types::Pod;
use prost::Message;

use super::{POD, text};

/// The node's resolv.conf.
pub fn resolv_conf(data: &[u8]) {
    let Ok(host) = dns::parse(&text(data)) else { return };
    drop(dns::check_host_file("/etc/resolv.conf", &host, "cluster.local"));
    bounded_dns(&POD, Some(&host));
}

/// Pod DNS settings stay within their limits, whatever the node's file contains.
pub fn bounded_dns(pod: &Pod, host: Option<&dns::HostDns>) {
    let settings = dns::DnsSettings {
        cluster_dns: vec!["10.0.0.10".to_owned()],
        cluster_domain: "cluster.local".to_owned(),
        loopback: Vec::new(),
    };
    for settings in [settings, dns::DnsSettings::default()] {
        let dns = dns::of_pod(pod, &settings, host).config;
        assert!(dns.servers.len() <= 3 && dns.searches.len() <= 32 && dns.searches.join(" ").len() <= 2048);
    }
}

/// A containerd event: as an envelope, and as the body of each relevant event type.
pub fn containerd_event(data: &[u8]) {
    if let Ok(envelope) = Envelope::decode(data) {
        drop(containerd_events::hint(&envelope));
    }
    for topic in ["/tasks/exit", "/tasks/delete", "/containers/create", "/containers/delete"] {
        let event = prost_types::Any { type_url: String::new(), value: data.to_vec() };
        let envelope = Envelope {
            timestamp: Some(prost_types::Timestamp { seconds: i64::MAX, nanos: i32::MIN }),
            namespace: "k8s.io".to_owned(),
            topic: topic.to_owned(),
            event: Some(event),
        };
        if let Some(hint) = containerd_events::hint(&envelope) {
            assert!(!hint.object.is_empty() && hint.object.len() <= data.len());
        }
    }
}

/// Runtime responses about one object.
pub fn cri_status(data: &[u8]) {
    let listed = cri::Container::decode(data).unwrap_or_default();
    drop((cri_conversions::listed_container(&listed), cri_conversions::pod_of_container(&listed)));
    if let Ok(status) = cri::ContainerStatus::decode(data) {
        drop(cri_conversions::container(&listed, &status));
        drop(cri_conversions::exit(&status));
    }
    if let Ok(sandbox) = cri::PodSandbox::decode(data) {
        drop((cri_conversions::listed_sandbox(&sandbox), cri_conversions::pod_of_sandbox(&sandbox)));
    }
    if let Ok(status) = cri::PodSandboxStatus::decode(data) {
        drop(cri_conversions::sandbox(&status));
    }
}

/// A CRI endpoint.
pub fn cri_endpoint(data: &[u8]) {
    if let Ok(path) = socket_path(&text(data)) {
        assert!(!path.as_os_str().is_empty());
    }
}

//! Service environment variables of a container (service links). Pure. Implements spec 02b §10.4.

use std::{collections::BTreeMap, net::Ipv6Addr, sync::Arc};

use super::api;

/// Name and namespace of the service whose variables every pod receives.
const MASTER_SERVICE: (&str, &str) = ("kubernetes", "default");

/// Returns the variables of the services that are visible to a pod, sorted by name.
pub fn service_variables(
    services: &[Arc<api::Service>],
    namespace: &str,
    service_links: bool,
) -> BTreeMap<String, String> {
    let mut chosen: BTreeMap<&str, &api::Service> = BTreeMap::new();
    for service in services.iter().filter(|s| cluster_ip(s).is_some()) {
        let Some(name) = service.metadata.name.as_deref() else { continue };
        let home = service.metadata.namespace.as_deref().unwrap_or_default();
        if (name, home) == MASTER_SERVICE {
            // A service of that name in the pod's own namespace takes precedence, whatever the order.
            chosen.entry(name).or_insert(service);
        } else if service_links && home == namespace {
            chosen.insert(name, service);
        }
    }
    let mut variables = BTreeMap::new();
    for (name, service) in chosen {
        describe(&mut variables, name, service);
    }
    variables
}

/// Cluster IP of a service; `None` for a headless one.
fn cluster_ip(service: &api::Service) -> Option<&str> {
    let ip = service.spec.as_ref()?.cluster_ip.as_deref()?;
    (!ip.is_empty() && ip != "None").then_some(ip)
}

fn describe(out: &mut BTreeMap<String, String>, service_name: &str, service: &api::Service) {
    let Some(ip) = cluster_ip(service) else { return };
    let ports = service.spec.as_ref().and_then(|s| s.ports.as_deref()).unwrap_or_default();
    let prefix = variable_name(service_name);
    let host = if ip.parse::<Ipv6Addr>().is_ok() { format!("[{ip}]") } else { ip.to_owned() };
    out.insert(format!("{prefix}_SERVICE_HOST"), ip.to_owned());
    for (i, port) in ports.iter().enumerate() {
        let number = port.port.to_string();
        let protocol = port.protocol.as_deref().filter(|p| !p.is_empty()).unwrap_or("TCP");
        let url = format!("{}://{host}:{number}", protocol.to_lowercase());
        if i == 0 {
            out.insert(format!("{prefix}_SERVICE_PORT"), number.clone());
            out.insert(format!("{prefix}_PORT"), url.clone());
        }
        if let Some(name) = port.name.as_deref().filter(|n| !n.is_empty()) {
            out.insert(format!("{prefix}_SERVICE_PORT_{}", variable_name(name)), number.clone());
        }
        let link = format!("{prefix}_PORT_{number}_{}", protocol.to_uppercase());
        out.insert(format!("{link}_PROTO"), protocol.to_lowercase());
        out.insert(format!("{link}_PORT"), number);
        out.insert(format!("{link}_ADDR"), ip.to_owned());
        out.insert(link, url);
    }
}

fn variable_name(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(namespace: &str, name: &str, ip: &str, ports: serde_json::Value) -> Arc<api::Service> {
        Arc::new(
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": name, "namespace": namespace},
                "spec": {"clusterIP": ip, "ports": ports},
            }))
            .expect("a service"),
        )
    }

    fn names(services: &[Arc<api::Service>], links: bool) -> Vec<String> {
        service_variables(services, "n", links).into_iter().map(|(k, v)| format!("{k}={v}")).collect()
    }

    #[test]
    fn a_service_has_variables_in_both_styles() {
        use serde_json::json;
        let web = service(
            "n",
            "my-web",
            "10.0.0.1",
            json!([{"name": "http-x", "port": 80}, {"port": 53, "protocol": "UDP"}]),
        );
        assert_eq!(
            names(&[web], true),
            [
                "MY_WEB_PORT=tcp://10.0.0.1:80",
                "MY_WEB_PORT_53_UDP=udp://10.0.0.1:53",
                "MY_WEB_PORT_53_UDP_ADDR=10.0.0.1",
                "MY_WEB_PORT_53_UDP_PORT=53",
                "MY_WEB_PORT_53_UDP_PROTO=udp",
                "MY_WEB_PORT_80_TCP=tcp://10.0.0.1:80",
                "MY_WEB_PORT_80_TCP_ADDR=10.0.0.1",
                "MY_WEB_PORT_80_TCP_PORT=80",
                "MY_WEB_PORT_80_TCP_PROTO=tcp",
                "MY_WEB_SERVICE_HOST=10.0.0.1",
                "MY_WEB_SERVICE_PORT=80",
                "MY_WEB_SERVICE_PORT_HTTP_X=80",
            ]
        );
    }

    #[test]
    fn ipv6_is_bracketed_in_urls_only() {
        let six = names(&[service("n", "s", "fd00::1", serde_json::json!([{"port": 1}]))], true);
        assert!(six.contains(&"S_PORT=tcp://[fd00::1]:1".to_owned()), "{six:?}");
        assert!(six.contains(&"S_SERVICE_HOST=fd00::1".to_owned()), "{six:?}");
    }

    #[test]
    fn only_services_with_an_address_that_the_pod_may_see_count() {
        use serde_json::json;
        let port = || json!([{"port": 1}]);
        let all = [
            service("n", "own", "10.0.0.1", port()),
            service("n", "headless", "None", port()),
            service("n", "pending", "", port()),
            service("elsewhere", "other", "10.0.0.2", port()),
            service("default", "kubernetes", "10.0.0.3", port()),
        ];
        let hosts =
            |links| -> Vec<String> { names(&all, links).into_iter().filter(|v| v.contains("_SERVICE_HOST")).collect() };
        assert_eq!(hosts(true), ["KUBERNETES_SERVICE_HOST=10.0.0.3", "OWN_SERVICE_HOST=10.0.0.1"]);
        // AC-02b-19
        assert_eq!(hosts(false), ["KUBERNETES_SERVICE_HOST=10.0.0.3"]);
    }

    #[test]
    fn a_local_service_named_kubernetes_wins() {
        let master = service("default", "kubernetes", "10.0.0.3", serde_json::json!([]));
        let local = service("n", "kubernetes", "10.0.0.4", serde_json::json!([]));
        for order in [[master.clone(), local.clone()], [local, master]] {
            assert_eq!(names(&order, true), ["KUBERNETES_SERVICE_HOST=10.0.0.4"]);
            assert_eq!(names(&order, false), ["KUBERNETES_SERVICE_HOST=10.0.0.3"]);
        }
    }
}

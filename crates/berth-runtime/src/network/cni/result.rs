//! CNI plugin results and errors. Pure.
//!
//! Implements spec 09b §13.2.

use std::net::IpAddr;

use serde_json::Value;

use super::super::cidr::Cidr;

/// The addresses that a result assigns to an interface, with the first IPv4 address in front.
pub fn addresses(result: &Value, link: &str) -> Vec<IpAddr> {
    let list = |key: &str| result.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
    let links = list("interfaces");
    // An address without an interface belongs to the pod; one of a host interface does not.
    let is_pods = |ip: &Value| {
        let Some(place) = ip.get("interface").and_then(Value::as_u64) else { return true };
        let named = usize::try_from(place).ok().and_then(|place| links.get(place));
        named.is_some_and(|l| {
            l.get("name").and_then(Value::as_str) == Some(link)
                && l.get("sandbox").and_then(Value::as_str).is_some_and(|s| !s.is_empty())
        })
    };
    let mut found: Vec<IpAddr> = list("ips").iter().filter(|ip| is_pods(ip)).filter_map(address).collect();
    if let Some(first) = found.iter().position(IpAddr::is_ipv4) {
        found[..=first].rotate_right(1);
    }
    found
}

fn address(ip: &Value) -> Option<IpAddr> {
    let text = ip.get("address")?.as_str()?;
    let net: Cidr = text.parse().ok()?;
    let address: IpAddr = text.split('/').next()?.trim().parse().ok()?;
    net.contains(address).then_some(address)
}

/// Converts a result of any version to version 1.0.0.
pub fn converted(mut result: Value) -> Value {
    if let Some(object) = result.as_object_mut() {
        object.insert("cniVersion".to_owned(), "1.0.0".into());
    }
    for ip in result.get_mut("ips").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(ip) = ip.as_object_mut() {
            ip.shift_remove("version");
        }
    }
    result
}

/// Error code and message of a failed plugin call.
pub fn failure(stdout: &[u8], stderr: &[u8]) -> (Option<u64>, String) {
    let response: Option<Value> = serde_json::from_slice(stdout).ok();
    let text =
        |key: &str| response.as_ref().and_then(|t| t.get(key)).and_then(Value::as_str).unwrap_or_default().to_owned();
    let code = response.as_ref().and_then(|t| t.get("code")).and_then(Value::as_u64);
    match (text("msg"), text("details")) {
        (msg, details) if !msg.is_empty() && !details.is_empty() => (code, format!("{msg}; {details}")),
        (msg, _) if !msg.is_empty() => (code, msg),
        _ => {
            let outputs = [stderr, stdout].map(|b| String::from_utf8_lossy(b).trim().to_owned());
            let output = outputs.into_iter().find(|s| !s.is_empty());
            (code, output.unwrap_or_else(|| "netplugin failed with no error message".to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_pods_addresses_are_found() {
        let result = json!({
            "cniVersion": "0.4.0",
            "interfaces": [{"name": "cni0"}, {"name": "eth0", "sandbox": "/run/netns/x"}, {"name": "eth0"}],
            "ips": [
                {"version": "4", "address": "10.0.0.1/24", "interface": 0},
                {"version": "6", "address": "fd00::2/64", "interface": 1},
                {"version": "4", "address": "10.0.0.2/24", "interface": 1},
                {"version": "4", "address": "10.0.0.3/24"},
                {"address": "nonsense", "interface": 1},
                {"address": "10.0.0.9/24", "interface": 77},
            ],
        });
        let ips: Vec<String> = addresses(&result, "eth0").iter().map(ToString::to_string).collect();
        assert_eq!(ips, ["10.0.0.2", "fd00::2", "10.0.0.3"]);
        assert!(addresses(&json!({"ips": 5}), "eth0").is_empty());
        let converted = converted(result);
        assert_eq!(converted["cniVersion"], "1.0.0");
        assert_eq!(converted["ips"][2], json!({"address": "10.0.0.2/24", "interface": 1}));
    }

    #[test]
    fn plugin_failures_have_code_and_message() {
        let cases: [(&str, &str, Option<u64>, &str); 4] = [
            (r#"{"code":11,"msg":"later","details":"busy"}"#, "", Some(11), "later; busy"),
            (r#"{"code":7,"msg":"bad"}"#, "noise", Some(7), "bad"),
            ("oops", "panic!", None, "panic!"),
            ("", "", None, "netplugin failed with no error message"),
        ];
        for (stdout, stderr, code, text) in cases {
            assert_eq!(failure(stdout.as_bytes(), stderr.as_bytes()), (code, text.to_owned()));
        }
    }
}

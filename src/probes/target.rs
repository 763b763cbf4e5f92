//! Probe targets: ports, hosts, headers, and commands from the spec. Pure.
//!
//! Implements spec 05 §1.7, §1.8.

use std::sync::LazyLock;

use http::{HeaderMap, HeaderName, HeaderValue, header};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{outcome::Outcome, url::Url};
use berth_types::{
    api,
    expansion::{TooLong, Variables},
};

/// Maximum number of redirects that are followed; the next one is a failure.
pub const MOST_REDIRECTS: usize = 10;

/// `User-Agent` of probes.
pub fn user_agent() -> String {
    format!("kube-probe/{}.{}", berth_config::version::MAJOR, berth_config::version::MINOR)
}

/// `User-Agent` as a header value.
static AGENT: LazyLock<Result<HeaderValue, String>> =
    LazyLock::new(|| HeaderValue::try_from(user_agent()).map_err(|e| e.to_string()));

/// Resolves the port of a probe: a number, the name of a port of the same container, or a number in quotes.
///
/// # Errors
/// There is no such port.
pub fn port(port: &IntOrString, container: &api::Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => i64::from(*number),
        IntOrString::String(name) => {
            let named = container.ports.iter().flatten().find(|p| p.name.as_deref() == Some(name));
            match named {
                Some(found) => i64::from(found.container_port),
                None => parsed(name)?,
            }
        }
    };
    port_number(number)
}

/// Checks a port number.
///
/// # Errors
/// The number is outside 1-65535.
pub fn port_number(number: i64) -> Result<u16, String> {
    u16::try_from(number).ok().filter(|n| *n > 0).ok_or_else(|| format!("invalid port number: {number}"))
}

fn parsed(text: &str) -> Result<i64, String> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("strconv.Atoi: parsing {text:?}: invalid syntax"));
    }
    text.parse().map_err(|_| format!("strconv.Atoi: parsing {text:?}: value out of range"))
}

/// `host:port`, with brackets around an IPv6 address.
pub fn joined(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Command of an exec probe, with variables expanded that the container declares as plain values.
///
/// # Errors
/// Expansion makes the command longer than any kernel accepts.
pub fn command(action: &api::ExecAction, container: &api::Container) -> Result<Vec<String>, TooLong> {
    let plain = |env: &'_ api::EnvVar| env.value_from.is_none();
    let env = container.env.iter().flatten().filter(|env| plain(env));
    let variables = Variables::new(env.map(|e| (e.name.as_str(), e.value.as_deref().unwrap_or_default())));
    variables.expand_all(action.command.as_deref().unwrap_or_default())
}

/// Request of an HTTP probe.
#[derive(Clone, PartialEq, Debug)]
pub struct HttpRequest {
    /// URL of the request.
    pub url: Url,
    /// All headers except `Host`.
    pub headers: HeaderMap,
    /// `Host` header of the spec, if any.
    pub host: Option<HeaderValue>,
}

/// Headers that describe a body; a probe has none.
const OF_A_BODY: [HeaderName; 3] = [header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::TRAILER];

impl HttpRequest {
    /// Creates the first request. `ip` is the pod's address.
    ///
    /// # Errors
    /// An error if the pod's address is unknown or the port does not exist. A failure if a header is invalid: that is
    /// permanent.
    pub fn new(action: &api::HTTPGetAction, container: &api::Container, ip: Option<&str>) -> Result<Self, Outcome> {
        let host = match action.host.as_deref().filter(|h| !h.is_empty()) {
            Some(host) => host,
            None => ip.ok_or_else(|| Outcome::unknown(NO_ADDRESS))?,
        };
        let port = port(&action.port, container).map_err(Outcome::unknown)?;
        let scheme = action.scheme.as_deref().unwrap_or_default();
        let url = Url::of(scheme, host, port, action.path.as_deref().unwrap_or_default());
        let mut headers = HeaderMap::new();
        let mut host = None;
        for given in action.http_headers.iter().flatten() {
            let unfit = |what: String| Outcome::Failure(format!("Get {:?}: net/http: {what}", url.to_string()));
            let name: HeaderName =
                given.name.parse().map_err(|_| unfit(format!("invalid header field name {:?}", given.name)))?;
            let value = HeaderValue::from_bytes(given.value.trim_matches([' ', '\t']).as_bytes())
                .map_err(|_| unfit(format!("invalid header field value for {:?}", canonical(&name))))?;
            if name == header::HOST {
                host = host.or(Some(value).filter(|v| !v.is_empty()));
            } else if !OF_A_BODY.contains(&name) {
                headers.try_append(name, value).map_err(|_| Outcome::unknown("too many headers"))?;
            }
        }
        let agent = AGENT.as_ref().map_err(Outcome::unknown)?.clone();
        for (name, default) in [(header::USER_AGENT, agent), (header::ACCEPT, HeaderValue::from_static("*/*"))] {
            match headers.get(&name) {
                None => drop(headers.insert(name, default)),
                Some(given) if given.is_empty() => drop(headers.remove(name)),
                Some(_) => {}
            }
        }
        Ok(Self { url, headers, host })
    }

    /// Creates the request that follows a redirect with that status and `Location`; `None` if the response is final.
    ///
    /// # Errors
    /// The location is no valid URL.
    pub fn redirected(&self, first_host: &str, status: u16, location: Option<&str>) -> Result<Option<Self>, String> {
        let location = location.filter(|location| !location.is_empty());
        let (301 | 302 | 303 | 307 | 308, Some(location)) = (status, location) else { return Ok(None) };
        let (url, is_absolute) = self.url.join(location)?;
        if url.host != first_host {
            return Ok(None);
        }
        if !matches!(url.scheme.as_str(), "http" | "https") {
            return Err(format!("unsupported protocol scheme {:?}", url.scheme));
        }
        let mut headers = self.headers.clone();
        if (self.url.scheme.as_str(), url.scheme.as_str()) != ("https", "http")
            && let Ok(from) = HeaderValue::from_str(&self.url.to_string())
        {
            headers.entry(header::REFERER).or_insert(from);
        }
        let host = self.host.clone().filter(|_| !is_absolute);
        Ok(Some(Self { url, headers, host }))
    }
}

/// Canonical form of a header name.
fn canonical(name: &HeaderName) -> String {
    let mut is_first = true;
    let letter = |letter: char| {
        let sent = if is_first { letter.to_ascii_uppercase() } else { letter };
        is_first = letter == '-';
        sent
    };
    name.as_str().chars().map(letter).collect()
}

/// Error text of a pod without an address.
pub const NO_ADDRESS: &str = "pod has no IP address yet";

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn container(value: Value) -> api::Container {
        serde_json::from_value(value).expect("a container")
    }

    fn web() -> api::Container {
        container(
            json!({"name": "c", "ports": [{"name": "web", "containerPort": 8080}, {"name": "81", "containerPort": 82}]}),
        )
    }

    fn ask(value: Value) -> Result<HttpRequest, Outcome> {
        HttpRequest::new(&serde_json::from_value(value).expect("an action"), &web(), Some("10.0.0.1"))
    }

    #[test]
    fn ports_are_numbers_or_names_of_the_same_container() {
        let of = |value: Value| port(&serde_json::from_value(value).expect("a port"), &web());
        for (value, expected) in [
            (json!(80), Ok(80)),
            (json!("web"), Ok(8080)),
            (json!("81"), Ok(82)),
            (json!("83"), Ok(83)),
            (json!(0), Err("invalid port number: 0")),
            (json!(65536), Err("invalid port number: 65536")),
            (json!("-1"), Err("invalid port number: -1")),
            (json!("nope"), Err(r#"strconv.Atoi: parsing "nope": invalid syntax"#)),
            (json!(""), Err(r#"strconv.Atoi: parsing "": invalid syntax"#)),
            (json!("99999999999999999999"), Err(r#"strconv.Atoi: parsing "99999999999999999999": value out of range"#)),
        ] {
            assert_eq!(of(value.clone()), expected.map_err(str::to_owned), "{value}");
        }
    }

    fn shown(ask: &HttpRequest) -> Vec<String> {
        let text = |v: &HeaderValue| String::from_utf8_lossy(v.as_bytes()).into_owned();
        let mut all: Vec<String> = ask.headers.iter().map(|(name, value)| format!("{name}: {}", text(value))).collect();
        all.extend(ask.host.as_ref().map(|host| format!("host: {}", text(host))));
        all.sort();
        all
    }

    #[test]
    fn ac_05_2_and_3_headers() {
        let given = |headers: Value| ask(json!({"port": "web", "httpHeaders": headers})).map(|ask| shown(&ask));
        let h = |name: &str, value: &str| json!({"name": name, "value": value});
        for (case, headers, expected) in [
            ("AC-05-2", json!([]), vec!["accept: */*", "user-agent: kube-probe/1.36"]),
            ("AC-05-3", json!([h("User-Agent", ""), h("Accept", "")]), vec![]),
            (
                "own ones",
                json!([h("user-agent", "me"), h("ACCEPT", "a/b"), h("X-A", "1"), h("x-a", "2")]),
                vec!["accept: a/b", "user-agent: me", "x-a: 1", "x-a: 2"],
            ),
            (
                "the first host",
                json!([h("Host", "a"), h("host", "b")]),
                vec!["accept: */*", "host: a", "user-agent: kube-probe/1.36"],
            ),
            (
                "none of a body",
                json!([h("Content-Length", "99"), h("Transfer-Encoding", "chunked"), h("Accept", "")]),
                vec!["user-agent: kube-probe/1.36"],
            ),
        ] {
            assert_eq!(given(headers), Ok(expected.into_iter().map(str::to_owned).collect()), "{case}");
        }
        assert_eq!(given(json!([h("x-a", "é\t"), h("Accept", ""), h("User-Agent", "")])).map(|all| all.len()), Ok(1));
        for (name, value, expected) in [
            ("a b", "x", r#"invalid header field name "a b""#),
            ("foo-bar", "x\r\nb: c", r#"invalid header field value for "Foo-Bar""#),
            ("host", "\u{7}", r#"invalid header field value for "Host""#),
        ] {
            let text = format!("Get \"http://10.0.0.1:8080/\": net/http: {expected}");
            assert_eq!(given(json!([h(name, value)])), Err(Outcome::Failure(text)));
        }
    }

    #[test]
    fn the_host_is_the_pods_or_its_own() {
        let url = |value: Value| ask(value).map(|ask| ask.url.to_string());
        assert_eq!(url(json!({"port": 80})), Ok("http://10.0.0.1:80/".to_owned()));
        assert_eq!(url(json!({"port": 80, "host": "h", "scheme": "HTTPS"})), Ok("https://h:80/".to_owned()));
        let none = HttpRequest::new(&serde_json::from_value(json!({"port": 80})).expect("an action"), &web(), None);
        assert_eq!(none, Err(Outcome::unknown(NO_ADDRESS)));
    }

    #[test]
    fn ac_05_5_redirects_stay_with_the_host() {
        let first = ask(json!({"port": 80, "path": "/a", "httpHeaders": [{"name": "Host", "value": "virtual"}]}))
            .expect("can be asked");
        let next = |status: u16, location: Option<&str>| {
            first.redirected("10.0.0.1", status, location).map(|next| next.map(|ask| ask.url.to_string()))
        };
        for status in [301, 302, 303, 307, 308] {
            assert_eq!(next(status, Some("/b")), Ok(Some("http://10.0.0.1:80/b".to_owned())));
        }
        assert_eq!(next(302, Some("http://10.0.0.1:81/b")), Ok(Some("http://10.0.0.1:81/b".to_owned())));
        for (status, location) in
            [(300, "/b"), (304, "/b"), (302, ""), (302, "http://10.0.0.2/b"), (200, "/b")].map(|(s, l)| (s, Some(l)))
        {
            assert_eq!(next(status, location), Ok(None), "{status} {location:?}");
        }
        assert_eq!(next(302, None), Ok(None));
        assert!(next(302, Some("/%zz")).is_err() && next(302, Some("ftp://10.0.0.1/")).is_err());
        let relative = first.redirected("10.0.0.1", 302, Some("/b")).expect("sound").expect("followed");
        assert_eq!(relative.host, first.host);
        assert_eq!(relative.headers[header::REFERER], "http://10.0.0.1:80/a");
        let absolute = first.redirected("10.0.0.1", 302, Some("http://10.0.0.1/b")).expect("sound").expect("followed");
        assert_eq!(absolute.host, None);
    }

    #[test]
    fn commands_know_plain_variables_only() {
        let container = container(json!({"name": "c", "env": [
            {"name": "A", "value": "1"}, {"name": "N"}, {"name": "F", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}));
        let action =
            serde_json::from_value(json!({"command": ["x", "$(A)$(N)", "$(F) $(NONE) $$(A)"]})).expect("an action");
        let expanded = command(&action, &container).expect("short");
        assert_eq!(expanded, ["x", "1", "$(F) $(NONE) $(A)"]);
    }

    #[test]
    fn addresses_of_version_6_are_bracketed() {
        assert_eq!((joined("10.0.0.1", 1), joined("fd00::1", 2)), ("10.0.0.1:1".to_owned(), "[fd00::1]:2".to_owned()));
    }
}

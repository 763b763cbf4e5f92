//! HTTP redirect rules of Go's client, which upstream uses: targets and sensitive headers. Pure.

use http::Uri;

/// Maximum number of requests per fetch, redirects included.
pub const MAX_REQUESTS: usize = 10;

/// Headers that are sent to the first host and its subdomains only.
pub const SENSITIVE: [&str; 4] = ["authorization", "www-authenticate", "cookie", "cookie2"];

/// The target of a `Location` header; `None` if it is not an HTTP(S) URL.
pub fn target(base: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next().unwrap_or_default();
    let scheme = base.scheme_str()?;
    let authority = base.authority()?.as_str();
    let has_scheme =
        location.split_once("://").is_some_and(|(scheme, _)| scheme.bytes().all(|b| b.is_ascii_alphanumeric()));
    let text = if has_scheme {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else {
        format!("{scheme}://{authority}{}", path(base, location))
    };
    let uri: Uri = text.parse().ok()?;
    let known = matches!(uri.scheme_str(), Some("http" | "https"));
    if known && uri.authority().is_some() { Some(uri) } else { None }
}

/// Path and query of a relative location.
fn path(base: &Uri, location: &str) -> String {
    if location.starts_with('?') {
        return format!("{}{location}", base.path());
    }
    if location.is_empty() {
        return base.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string);
    }
    let (path, query) = match location.split_once('?') {
        Some((path, query)) => (path, format!("?{query}")),
        None => (location, String::new()),
    };
    let merged = if path.starts_with('/') {
        path.to_owned()
    } else {
        let directory = base.path().rsplit_once('/').map_or("", |(directory, _)| directory);
        format!("{directory}/{path}")
    };
    format!("{}{query}", without_dots(&merged))
}

fn without_dots(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').skip(1) {
        match part {
            "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    let ends_open = path.ends_with("/.") || path.ends_with("/..");
    format!("/{}{}", parts.join("/"), if ends_open && !parts.is_empty() { "/" } else { "" })
}

/// Whether sensitive headers may be sent: the host is the first one or a subdomain of it.
pub fn may_send_sensitive(first: &Uri, next: &Uri) -> bool {
    match (first.host(), next.host()) {
        (Some(first), Some(next)) => {
            let (first, next) = (first.to_ascii_lowercase(), next.to_ascii_lowercase());
            // IP addresses have no subdomains, even if their text looks like it.
            let is_name = next.parse::<std::net::IpAddr>().is_err();
            next == first || (is_name && next.strip_suffix(&first).is_some_and(|rest| rest.ends_with('.')))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_resolved() {
        let base: Uri = "http://host:8080/a/b?q=1".parse().expect("a URI");
        for (location, expected) in [
            ("https://other/x", "https://other/x"),
            ("//other/x", "http://other/x"),
            ("/x?y=2", "http://host:8080/x?y=2"),
            ("c", "http://host:8080/a/c"),
            ("../c/./d#frag", "http://host:8080/c/d"),
            ("../../../c", "http://host:8080/c"),
            ("?z", "http://host:8080/a/b?z"),
            ("", "http://host:8080/a/b?q=1"),
        ] {
            let found = target(&base, location).map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), Some(expected), "{location}");
        }
        for bad in ["ftp://x/y", "http://", "http://a b/"] {
            assert_eq!(target(&base, bad), None, "{bad}");
        }
    }

    #[test]
    fn secrets_stay_with_the_first_host() {
        let uri = |text: &str| text.parse::<Uri>().expect("a URI");
        for (next, may) in [
            ("http://example.com/", true),
            ("https://a.EXAMPLE.com:1/", true),
            ("http://badexample.com/", false),
            ("http://com/", false),
        ] {
            assert_eq!(may_send_sensitive(&uri("http://example.com:8080/x"), &uri(next)), may, "{next}");
        }
        assert!(!may_send_sensitive(&uri("http://0.0.1/"), &uri("http://10.0.0.1/")));
    }
}

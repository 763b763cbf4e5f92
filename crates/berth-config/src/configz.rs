//! Serializes the configuration for `/configz`: v1beta1 JSON in declaration order. Pure. Spec 01 §7.2.

use serde_json::{Value, json};

use super::{fields::KubeletConfiguration, text::without_password};

/// Returns the configuration as JSON; secrets included.
pub fn to_json(config: &KubeletConfiguration) -> Value {
    serde_json::to_value(config).expect("the configuration has string keys only")
}

/// Returns the body of `/configz`, without a trailing newline; secrets included, as in the reference.
pub fn body(config: &KubeletConfiguration) -> String {
    json!({ "kubeletconfig": to_json(config) }).to_string()
}

/// Returns the configuration for the log, with the values of `staticPodURLHeader` and a password in `staticPodURL`
/// masked.
pub fn masked(config: &KubeletConfiguration) -> String {
    let mut config = config.clone();
    config.static_pod_url = without_password(&config.static_pod_url);
    for values in config.static_pod_url_header.values_mut() {
        "<masked>".clone_into(values.first_mut().unwrap_or(&mut String::new()));
        values.truncate(1);
    }
    to_json(&config).to_string()
}

/// Returns the value of a flag for the log, masked likewise.
pub fn masked_flag(name: &str, value: &str) -> String {
    match name {
        "manifest-url" => without_password(value),
        "manifest-url-header" if !value.is_empty() => "<masked>".to_owned(),
        _ => value.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::defaults;

    #[test]
    fn the_defaults_read_as_the_reference_shows_them() {
        let mut config = defaults::defaults();
        config.eviction_hard = defaults::hard_eviction();
        assert_eq!(body(&config), include_str!("configz_defaults.json").trim_end(), "AC-01-26");
    }

    #[test]
    fn header_values_are_masked_for_the_log_only() {
        let mut config = defaults::defaults();
        config.static_pod_url_header.insert("Auth".to_owned(), vec!["secret".to_owned(), "other".to_owned()]);
        assert!(!masked(&config).contains("secret") && masked(&config).contains("<masked>"));
        assert!(!masked(&config).contains("other") && body(&config).contains("secret"));
    }

    #[test]
    fn flags_and_urls_are_masked_likewise() {
        let mut config = defaults::defaults();
        config.static_pod_url = "http://me:sec/ret@host/pods".to_owned();
        assert!(masked(&config).contains("\"http://me:***@host/pods\"") && body(&config).contains("sec/ret"));
        for (name, value, shown) in [
            ("manifest-url", "http://me:secret@host/pods", "http://me:***@host/pods"),
            ("manifest-url-header", "Authorization:Bearer x", "<masked>"),
            ("manifest-url-header", "", ""),
            ("node-labels", "a=b", "a=b"),
        ] {
            assert_eq!(masked_flag(name, value), shown);
        }
    }

    #[test]
    fn the_flush_frequency_is_shown_as_it_was_given() {
        let mut config = defaults::defaults();
        config.logging.flush_frequency.as_string = false;
        assert!(body(&config).contains("\"flushFrequency\":5000000000"));
    }
}

//! Names are reserved for as long as what has them lives; who asks for the same again is given the same.
//!
//! A request that is under way is *joined* by an identical one: both are told the same. What was made for an identical
//! request is returned again where it is still fit. Everything else is refused. Behaviour: spec 09 §9 (AC-09-E6).

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

use super::errors::{ErrorKind, RuntimeError, RuntimeResult};

/// What a request ends with: an identity.
pub type Outcome = RuntimeResult<String>;
/// Tells what a request ends with once it has.
pub type Flight = watch::Receiver<Option<Outcome>>;

/// All names there are.
#[derive(Debug)]
pub struct Names<R>(Mutex<HashMap<String, Held<R>>>);

#[derive(Debug)]
struct Held<R> {
    id: String,
    /// What was asked for.
    request: R,
    flight: Option<Flight>,
}

impl<R> Default for Names<R> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// What a name is answered with.
#[derive(Debug)]
pub enum Claim {
    /// It is yours: make the object, and tell what came of it.
    Mine(watch::Sender<Option<Outcome>>),
    /// Somebody is at it: wait for what comes of it.
    Join(Flight),
    /// There is one, made for the same request; to be returned where it is fit.
    Again(String),
}

impl<R: PartialEq> Names<R> {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Held<R>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for the name, for an object that would be `id`, made for that request.
    ///
    /// # Errors
    /// It belongs to something else.
    pub fn claim(&self, name: &str, id: &str, request: R) -> RuntimeResult<Claim> {
        let mut all = self.all();
        match all.get(name) {
            None => {
                let (told, flight) = watch::channel(None);
                let held = Held { id: id.to_owned(), request, flight: Some(flight) };
                all.insert(name.to_owned(), held);
                Ok(Claim::Mine(told))
            }
            Some(held) if held.request == request => Ok(match &held.flight {
                Some(flight) => Claim::Join(flight.clone()),
                None => Claim::Again(held.id.clone()),
            }),
            Some(held) => Err(taken(name, &held.id)),
        }
    }

    /// The object is there.
    pub fn settle(&self, name: &str) {
        if let Some(held) = self.all().get_mut(name) {
            held.flight = None;
        }
    }

    /// The name of something that was there before.
    pub fn recall(&self, name: &str, id: &str, request: R) {
        self.all().insert(name.to_owned(), Held { id: id.to_owned(), request, flight: None });
    }

    /// The object is gone, or never came to be.
    pub fn release(&self, name: &str, id: &str) {
        let mut all = self.all();
        if all.get(name).is_some_and(|held| held.id == id) {
            all.remove(name);
        }
    }
}

/// The refusal of a name.
pub fn taken(name: &str, id: &str) -> RuntimeError {
    RuntimeError::new(ErrorKind::Taken, format!("name \"{name}\" is reserved for \"{id}\""))
}

/// Waits for what comes of a request.
///
/// # Errors
/// What it failed with.
pub async fn join(mut flight: Flight) -> Outcome {
    match flight.wait_for(Option::is_some).await {
        Ok(outcome) => outcome.clone().unwrap_or_else(|| Err(RuntimeError::other("the request was given up"))),
        Err(_) => Err(RuntimeError::other("the request was given up")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn identical_requests_join_and_others_are_refused() {
        // AC-09-E6
        let names = Names::default();
        let Ok(Claim::Mine(told)) = names.claim("n", "id1", 1) else { panic!("free") };
        let Ok(Claim::Join(flight)) = names.claim("n", "id2", 1) else { panic!("under way") };
        let refused = names.claim("n", "id3", 2).expect_err("another request");
        assert_eq!(refused.text, "name \"n\" is reserved for \"id1\"");
        let _ = told.send(Some(Ok("id1".to_owned())));
        assert_eq!(join(flight).await, Ok("id1".to_owned()));
        names.settle("n");
        assert!(matches!(names.claim("n", "id4", 1), Ok(Claim::Again(id)) if id == "id1"));
        names.release("n", "id9");
        assert!(names.claim("n", "id5", 2).is_err(), "only who has it releases it");
        names.release("n", "id1");
        assert!(matches!(names.claim("n", "id5", 2), Ok(Claim::Mine(_))));
    }

    #[tokio::test]
    async fn who_joined_what_was_dropped_is_told() {
        let names = Names::default();
        let Ok(Claim::Mine(told)) = names.claim("n", "id1", 1) else { panic!("free") };
        let Ok(Claim::Join(flight)) = names.claim("n", "id2", 1) else { panic!("under way") };
        drop(told);
        assert!(join(flight).await.is_err());
    }
}

// Package house holds the laws of the house: which package may import which, how long a line is, and which
// words the project does not use. Its command measure prints how large the project is and how its files
// depend on each other.
package house
